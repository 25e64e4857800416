"""`dtgpt translate`: commands and scripts of Megatron-LM, nanoGPT and llm.c as recipes and commands of dtgpt."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Annotated

from dtgpt.commands.command import help_text, usage_of, wants_help, with_dashes
from dtgpt.config.overrides import read_words, take
from dtgpt.translate import nanogpt
from dtgpt.translate.programs import choose, translate_command
from dtgpt.translate.recipe_text import recipe_text
from dtgpt.translate.script import ASSIGNMENT, commands_of
from dtgpt.translate.translation import SLURM, Launch, Translation
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import PATH, Bounds, check_fields
from dtgpt.util.shared.output_files import cannot_write
from dtgpt.util.shared.words import hanging
from dtgpt.util.storage import did_you_mean, read_regular, write_text

LEFT = 46  # the column where texts begin
LARGEST = 1 << 20  # bytes of a script
EXAMPLE = "train.sh, or dtgpt translate -- torchrun pretrain_gpt.py --num-layers 24 ..."


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Write a recipe that computes what a command of Megatron-LM, nanoGPT or llm.c computes, with that program's
    defaults, and say of each option what became of it. Nothing of a script is run.

    SCRIPT is a shell script, or a config file of nanoGPT. Words after it are its arguments $1, $2 ...; NAME=VALUE sets
    a variable. `dtgpt translate -- COMMAND` takes a command itself; after a SCRIPT, words after -- are added to its
    command.

    Programs: Megatron-LM's pretrain_gpt.py, preprocess_data.py, checkpoint/convert.py, run_text_generation_server.py
    and tasks/main.py; nanoGPT's train.py; llm.c's train_gpt2cu and train_gpt2.py."""

    output: Annotated[str, "new recipe file", PATH] = "my_recipe.py"
    nth: Annotated[int | None, "which of several commands of a script", Bounds(1, 1000)] = None


def command(words: list[str]) -> int:
    """Run `dtgpt translate SCRIPT ...` or `dtgpt translate -- COMMAND`. Raises UserError."""
    at = words.index("--") if "--" in words else len(words)
    own, added = words[:at], words[at + 1 :]
    if wants_help(own):
        doc = getdoc(TranslateOptions) or ""
        say(with_dashes(help_text(doc, usage_of("translate SCRIPT ... | -- COMMAND"), TranslateOptions)))
        return 0
    free, given = read_words(own, TranslateOptions, free=True)
    options = take(TranslateOptions(), given)
    check_fields(options, "--")
    if not free and not added:
        raise UserError(f"dtgpt translate needs a script or a command, such as dtgpt translate {EXAMPLE}")
    if free:
        translation, source = translate_file(Path(free[0]), free[1:], added, options.nth), Path(free[0]).name
    else:
        translation, source = translate_command(added), "a command"
    show(translation, source, Path(options.output))
    return 0


def translate_file(path: Path, words: Sequence[str], added: Sequence[str], nth: int | None) -> Translation:
    """Return the translation of a script, called with `words`, or of a config file of nanoGPT. added: words at the end
    of its command. Raises UserError."""
    if not path.exists():
        raise UserError(f"there is no file {path}; {did_you_mean(path, 'give a script, or a command after --')}")
    if path.suffix == ".py":
        return nanogpt.translate([str(path), *words, *added], Launch())
    try:
        text = read_regular(path, LARGEST).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the script that has the command") from None
    variables = {match[1]: match[3] for word in words if (match := ASSIGNMENT.fullmatch(word))}
    arguments = [word for word in words if not ASSIGNMENT.fullmatch(word)]
    try:
        chosen = choose(commands_of(text, arguments, variables), nth)
        return translate_command([*chosen.words, *added], job_words(text))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def job_words(text: str) -> list[str]:
    """Return the words of a script's #SBATCH lines, read as Slurm reads them."""
    words: list[str] = []
    for line in re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE):
        try:
            words += shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"the line #SBATCH {shown(line)} cannot be read ({error}); mend it") from None
    return words


def show(translation: Translation, source: str, output: Path) -> None:
    """Print what became of each option and the command to run; write the recipe, if there is one, to the new file
    `output`. Raises UserError where it exists."""
    if not translation.words:
        if output.suffix != ".py":
            raise UserError(f"--output {output} is not a recipe file; give a name that ends with .py")
        text = recipe_text(translation, output.stem, source)
        if os.path.lexists(output):
            raise UserError(f"{output} exists already; give another --output")
        try:
            write_text(output, text)
        except OSError as error:
            raise cannot_write(output, error) from None
    for line in table(translation):
        say(line)
    if translation.words:
        say(f"\n{shlex.join(translation.words)}")
        return
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in translation.environment.items())
    say(f"\n{output}: a recipe; dtgpt plan {output} shows what it needs")
    launch, needs = translation.launch, translation.needs
    if (launch.world or (needs if launch.several else 1)) % needs:
        started = counted(launch.world or 1, "process", "processes")
        say(f"its plan needs {needs} processes, or a multiple, but the command starts {started}: start it in more")
        return
    if launch.slurm:
        say(f"dtgpt recipe slurm > {SLURM}")
    say(f"{settings}{launch.command(shlex.quote(str(output)))}")


def table(translation: Translation) -> Iterator[str]:
    """Yield the lines that say what became of each option; those with the same answer stand together."""
    for kind in ("translated", "not needed", "cannot be done"):
        rows = [row for row in translation.rows if row.kind == kind]
        if rows:
            yield f"{kind} ({len(rows)}):"
        if kind == "translated":
            yield from (_line(row.source, row.text) for row in rows)
            continue
        for text in dict.fromkeys(row.text for row in rows):
            yield hanging(f"  {text}:", 4)
            yield hanging(f"      {', '.join(row.source for row in rows if row.text == text)}", 6)


def _line(source: str, text: str) -> str:
    left = f"  {source}"
    return f"{left:<{LEFT}}{text}" if len(left) < LEFT - 1 else f"{left}\n{'':<{LEFT}}{text}"
