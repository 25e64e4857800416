"""The command lines of dtgpt: words become paths and values of options, `--help` tells the options, and a mistake is
one sentence.

A command is a dataclass of options and a function that does the work. What an option is called, takes and means stands
once, in the annotation of its field: the reader of words (`dtgpt.config.overrides`), the checks of values
(`dtgpt.util.field_types`) and the help here all read it. `dtgpt train` and other commands on recipes have the fields of
a recipe as options, too, and use the functions below by themselves.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import getdoc
from itertools import takewhile
from pathlib import Path
from typing import Any

from dtgpt.config.overrides import REQUIRED, describe_type, leaves, read_words, take, value_text
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import check_fields

ALL = "--help-all"
HELP = ("-h", "--help", ALL)
LEFT = 34  # the column where descriptions begin
LONGEST_TYPE = 24  # longer lists of choices stand in the description
LABEL = re.compile(r" *(?:\S+ )*\S+ {2,}(?=\S)")  # "hardware   one GPU": further lines are indented to the text
ENTRY = rf"\n(?=\S|{LABEL.pattern})"  # between two of them


@dataclass(frozen=True)
class Command:
    """A command of `dtgpt`; call it with the words after its name to run it and get the exit code.

    usage: its name, then its paths in capitals, as in "convert MODEL TARGET" and "plot RUN ...".
    options: a dataclass with `Annotated` fields, whose docstring `--help` prints unless there is a `doc`. If it has a
    field `input`, words that belong to no option are added to it, and there are no other paths.
    work: called with each path, and `options=`; returns the exit code, None for 0.
    example: words of a correct call, for error messages.
    aliases: other names of fields. explain: returns a sentence about an option that does not exist here, by its name
    and value; what it says nothing of, capabilities may know from other programs.
    """

    usage: str
    options: type
    work: Callable[..., int | None]
    example: str
    doc: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    explain: Callable[[str, str], str | None] = lambda name, value: None

    @property
    def name(self) -> str:
        return " ".join(takewhile(str.islower, self.usage.split()))

    def __call__(self, words: list[str]) -> int:
        """Run the command. Raises UserError."""
        if wants_help(words):
            say(with_dashes(help_text(self.help_doc(), usage_of(self.usage), self.options)))
            return 0
        paths, options = self.read(words)
        return self.work(*paths, options=options) or 0

    def help_doc(self) -> str:
        return self.doc or getdoc(self.options) or ""

    def _explain(self, name: str, value: str) -> str | None:
        known = (each.of_command(self.name, name, value) for each in seams.listed("explanations"))
        return self.explain(name, value) or next(filter(None, known), None)

    def read(self, words: list[str]) -> tuple[list[Path], Any]:
        """Return paths and options. Raises UserError for a value out of bounds, and for missing or extra paths."""
        needed = self.usage.removeprefix(self.name).strip()
        missing = UserError(f"dtgpt {self.name} needs {needed}, such as dtgpt {self.name} {self.example}")
        if needed and not words:
            raise missing
        try:
            free, given = read_words(words, self.options, free=True, aliases=self.aliases, explain=self._explain)
            options = take(self.options(), given)
            check_fields(options, "--")
        except UserError as error:
            raise UserError(with_dashes(str(error))) from None
        if hasattr(options, "input"):
            return [], replace(options, input=(*free, *options.input))
        count = sum(word.isupper() for word in needed.split())
        if len(free) < count:
            raise missing
        if len(free) > count and not needed.endswith("..."):
            raise UserError(f"{shown(free[count])} is not an option, and dtgpt {self.name} takes {needed} only")
        return [Path(word) for word in free], options


def with_dashes(text: str) -> str:
    """Return `text` with the options in it as they are usually typed, `--json-keys`."""
    return re.sub(r"(?<!\S)--[a-z_]+", lambda name: name[0].replace("_", "-"), text)


def wants_help(words: list[str]) -> bool:
    """Return whether help is asked for anywhere on a command line."""
    return any(word in HELP for word in words)


def usage_of(words: str) -> str:
    """Return `dtgpt WORDS` as it is typed, where this process was started by the command, by `python -m` or by
    torchrun."""
    is_module = Path(sys.argv[0]).parts[-2:] == ("dtgpt", "__main__.py")
    return f"{_starter()} -m dtgpt {words}" if is_module else f"dtgpt {words}"


def usage_of_file(name: str) -> str:
    """Return how the recipe of this name is started, where this process runs a recipe file as a script."""
    file = sys.argv[0] if sys.argv[0].endswith(".py") else f"recipes/{name}.py"
    return f"{_starter()} {file}"


def _starter() -> str:
    return "torchrun --nproc-per-node N" if "TORCHELASTIC_RUN_ID" in os.environ else "python"


def recipe_help(
    words: Collection[str], doc: str, program: str, own: Any, recipe: Any, without: Collection[str] = ()
) -> str:
    """Return the `help_text` of a command with options of its `own` that takes a recipe: of the recipe's options those
    that are used most, unless `words` ask for all."""
    if ALL in words:
        return help_text(doc, program, own, recipe, without=without)
    hidden = {name for name, *_ in leaves(recipe)} - {*without, *recipe.common, *(name for name, *_ in leaves(own))}
    text = help_text(doc, program, own, recipe, without=without, every=False)
    return f"{text}\n\n{len(hidden)} more options: {ALL}"


def help_text(doc: str, program: str, *configs: Any, without: Collection[str] = (), every: bool = True) -> str:
    """Return the usage, `doc`, and the options of `configs` with type, description and default, wrapped to the terminal
    (80 columns if there is none). A config may be a class, whose defaults are then shown. If several configs have the
    same option, the first one's is shown; options in `without` are not. every: False: of a config that names its
    `common` options, these alone, and of each description what stands before its first semicolon."""
    width = max(40, shutil.get_terminal_size().columns)
    usage = textwrap.wrap(f"usage: {program} [--option value ...]", width, subsequent_indent=" " * 7)
    lines = [*usage, "", *_wrap_text(doc.strip(), width)]  # which ends with an empty line
    listed = set(without)
    for config in configs:
        groups = _groups(config, listed, every)
        for heading, options in groups.items():
            lines.append(f"{heading}:")
            for name, type_, text, value in options:
                listed.add(name)
                description = text if every else text.partition(";")[0]
                lines += _row(name, type_, description, value, width)
            lines.append("")
    return "\n".join(lines).rstrip()


def _groups(config: Any, listed: Collection[str], every: bool = True) -> dict[str, list[tuple[str, Any, str, Any]]]:
    """Return the options that are not yet `listed` by heading: their section, or the entry of the config's `headings`
    at or before the field."""
    headings, top = getattr(config, "headings", {}), "options"
    common = None if every else getattr(config, "common", None)
    groups: dict[str, list[tuple[str, Any, str, Any]]] = {}
    for option in leaves(config):
        section = option[0].rpartition(".")[0]
        top = headings.get(option[0], top)
        if option[0] not in listed and (common is None or option[0] in common):
            groups.setdefault(section or top, []).append(option)
    return groups


def _row(name: str, type_: Any, description: str, value: Any, width: int) -> Iterator[str]:
    kind = describe_type(type_)
    if len(kind) > LONGEST_TYPE:
        kind, description = "NAME", f"{description}; one of {kind.replace('|', ', ')}"
    left = f"  --{name} {kind}"
    if len(left) > LEFT - 2:  # the description begins below
        yield left
        left = ""
    yield from textwrap.wrap(
        f"{description} [{_show(value)}]",
        width,
        initial_indent=f"{left:<{LEFT}}",
        subsequent_indent=" " * LEFT,
        break_on_hyphens=False,
    )


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "set by the recipe" if value is REQUIRED else value_text(value) or "empty"


def _wrap_text(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a docstring, its paragraphs rewrapped; lines with a label are paragraphs of their own."""
    for paragraph in re.split(r"\n\s*\n", text.expandtabs()):
        for entry in re.split(ENTRY, paragraph) if LABEL.match(paragraph) else [paragraph]:
            label = LABEL.match(entry)
            begin = label.end() if label else 0
            filled = entry[:begin] + " ".join(entry[begin:].split())
            yield from textwrap.wrap(filled, width, subsequent_indent=" " * begin, break_on_hyphens=False)
        yield ""
