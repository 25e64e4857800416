"""The `dtgpt` command and the entry point of recipe files."""

import difflib
import errno
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from dtgpt.console import accept_any_text, say, say_error
from dtgpt.errors import UserError

REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EACCES: "choose a place that can be read and written",
    errno.EPERM: "choose a place that can be read and written",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ENOTDIR: "choose another path",
    errno.EISDIR: "choose another path",
}
HELP = ("-h", "--help")
USAGE = """usage: dtgpt COMMAND ...

  dtgpt train RECIPE.py [--option value ...]    train; `torchrun RECIPE.py` does the same (--help lists the options)
  dtgpt generate RUN [--prompt TEXT ...]        continue a text with a run's newest checkpoint
  dtgpt plot RUN [RUN ...] [--output FILE.png]  draw the loss curves of runs into one picture
"""


def main(arguments: list[str] | None = None) -> None:
    """The `dtgpt` command."""
    words = sys.argv[1:] if arguments is None else arguments
    _exit(lambda: _command(words))


def _command(words: list[str]) -> int:
    commands = {"train": _train, "generate": _generate, "plot": _plot}
    if not words or words[0] in (*HELP, "help"):
        say(USAGE.rstrip())
        return 0
    if words[0] not in commands:
        near = difflib.get_close_matches(words[0], commands, n=1, cutoff=0)
        raise UserError(f"there is no command {words[0]!r}; did you mean dtgpt {near[0]}?")
    return commands[words[0]](words[1:])


def run_recipe(recipe_function: Callable, doc: str, arguments: list[str] | None = None) -> None:
    """What a recipe file calls at its end: train `recipe_function()` with the overrides of the command line."""
    _exit(lambda: _run(recipe_function, doc, sys.argv[1:] if arguments is None else arguments))


def _exit(work: Callable[[], int]) -> None:
    """Exit with the code that `work` returns; what the user can mend is one sentence on stderr and exit code 2."""
    accept_any_text()
    try:
        sys.exit(work())
    except UserError as error:
        sentence = str(error)
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        place = f"{error.filename}: " if error.filename else ""
        sentence = f"{place}{error.strerror}; {REMEDIES[error.errno]}"
    except KeyboardInterrupt:
        sys.exit(130)
    if _number_from_environment("RANK", 0) == 0:
        say_error(f"dtgpt: {sentence}")
    sys.exit(2)


def _number_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    return int(text) if text.isdigit() else default


def _run(recipe_function: Callable, doc: str, arguments: list[str]) -> int:
    from dtgpt.overrides import apply_overrides, help_text

    recipe = recipe_function()
    if any(word in HELP for word in arguments):
        say(help_text(recipe, doc or "", f"torchrun recipes/{recipe.name}.py"))
        return 0
    recipe = apply_overrides(recipe, arguments)
    world = _number_from_environment("WORLD_SIZE", 1)
    if world > 1:
        raise UserError(f"torchrun started {world} processes, but training runs on one device; use --nproc-per-node 1")
    from dtgpt.train import train

    return train(recipe)


def _train(words: list[str]) -> int:
    if words and words[0] in HELP:
        say(USAGE.rstrip())
        return 0
    if not words or words[0].startswith("-"):
        raise UserError("dtgpt train needs a recipe file, such as dtgpt train recipes/gpt2_tiny.py")
    module = _load_module(Path(words[0]))
    if not callable(getattr(module, "recipe", None)):
        raise UserError(f"{words[0]} is not a recipe: it defines no function recipe()")
    return _run(module.recipe, module.__doc__ or "", words[1:])


def _load_module(path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"there is no recipe file {path}; give one such as recipes/gpt2_tiny.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _generate(words: list[str]) -> int:
    from dtgpt.generate import GenerateConfig, generate_from_run
    from dtgpt.overrides import apply_overrides, help_text

    if any(word in HELP for word in words):
        say(help_text(GenerateConfig(), generate_from_run.__doc__, "dtgpt generate RUN"))
        return 0
    if not words or words[0].startswith("-"):
        raise UserError("dtgpt generate needs a run folder, such as dtgpt generate runs/gpt2_tiny-001 --prompt Hello")
    say(generate_from_run(Path(words[0]), apply_overrides(GenerateConfig(), words[1:])))
    return 0


def _plot(words: list[str]) -> int:
    from dtgpt.plot import plot_runs

    if any(word in HELP for word in words):
        say(USAGE.rstrip())
        return 0
    runs, output = [], "loss.png"
    rest = iter(words)
    for word in rest:
        if word.partition("=")[0] == "--output":
            output = word.partition("=")[2] if "=" in word else next(rest, "")
        elif word.startswith("-"):
            raise UserError(f"dtgpt plot has no option {word}; it takes run folders and --output FILE.png")
        else:
            runs.append(word)
    if not runs:
        raise UserError("dtgpt plot needs run folders, such as dtgpt plot runs/gpt2_tiny-001 runs/gpt2_tiny-002")
    plot_runs([Path(run) for run in runs], Path(output))
    say(output)
    return 0
