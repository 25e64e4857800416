"""The `dtgpt` command and the entry point of recipe files.

Both run one function and exit with its code. A user's mistake becomes one sentence on stderr and code 2, in each of the
processes of a run, of which one should be heard; a fault of dtgpt keeps its traceback. Commands are imported when they
are called, so that `dtgpt --help` answers at once. The core has two; capabilities add the others.
"""

import difflib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from dtgpt.commands.command import HELP
from dtgpt.util import seams
from dtgpt.util.console import close_streams, prepare_streams, say, say_error, say_interrupted
from dtgpt.util.errors import UserError, sentence_of, shown
from dtgpt.util.seams import CommandEntry

COMMANDS = {  # of the core
    "train": CommandEntry(
        "dtgpt.commands.train:command",
        "dtgpt train RECIPE.py [--option value ...]\n    train a model, also in several processes",
        place=30,
    ),
    "generate": CommandEntry(
        "dtgpt.commands.generate:command",
        "dtgpt generate MODEL [--prompt TEXT | --prompts-file FILE | --interactive]\n"
        "    continue texts with a run's newest checkpoint or another model",
        place=60,
    ),
}
RANK_0_FIRST = 5.0  # seconds for rank 0 to say first why the run ends
USAGE = "usage: dtgpt COMMAND ...     (dtgpt COMMAND --help lists the options of COMMAND)"


def main(arguments: list[str] | None = None) -> None:
    """Run the `dtgpt` command, and exit."""
    words = _without_rank(sys.argv[1:] if arguments is None else arguments)
    _exit(lambda: _command(words))


def commands() -> dict[str, CommandEntry]:
    """Return all commands by name, in their order."""
    found = COMMANDS | seams.added("commands")
    return dict(sorted(found.items(), key=lambda command: command[1].place))


def usage() -> str:
    """Return the list of commands."""
    lines = [line for entry in commands().values() for line in entry.usage.splitlines()]
    return "\n".join([USAGE, "", *(f"  {line}" for line in lines)])


def run_recipe(recipe_function: Callable, doc: str | None, arguments: list[str] | None = None) -> None:
    """Train `recipe_function()` with the options of the command line, and exit: the last line of a recipe file. `doc`:
    the file's docstring, if it has one, which --help shows."""
    words = _without_rank(sys.argv[1:] if arguments is None else arguments)

    def train() -> int:
        from dtgpt.commands.train import train_recipe

        return train_recipe(recipe_function, doc or "", words)

    _exit(train)


def _without_rank(words: list[str]) -> list[str]:
    """Return the words without the `--local-rank=N` that `python -m torch.distributed.launch` adds: the environment has
    it, too."""
    rank = os.environ.get("LOCAL_RANK", "")
    return [word for word in words if word not in (f"--local-rank={rank}", f"--local_rank={rank}") or not rank]


def _command(words: list[str]) -> int:
    if not words or words[0] in (*HELP, "help"):
        say(usage())
        return 0
    name, *rest = words
    known = commands()
    if name not in known:
        listed = [name for name, entry in known.items() if entry.usage]
        near = difflib.get_close_matches(name.lower(), listed, n=1)
        advice = f"did you mean dtgpt {near[0]}?" if near else f"use one of {', '.join(listed)}"
        raise UserError(f"there is no command {shown(name)}; {advice}")
    return seams.load(known[name].part)(rest)


def _exit(work: Callable[[], int]) -> None:
    """Exit with the code that `work` returns, or with code 2 and one sentence on stderr about the user's mistake."""
    prepare_streams()
    for watch in seams.listed("watches"):
        watch()
    try:
        _leave(work())
    except UserError as error:
        sentence = str(error)
    except OSError as error:
        if (told := sentence_of(error)) is None:
            raise
        sentence = told
    except ModuleNotFoundError as error:
        if error.name != "torch":  # which others than dtgpt lack, too, or dtgpt itself is damaged
            raise
        sentence = f"torch is not installed in {sys.executable}; install it: python -m pip install torch"
    except KeyboardInterrupt:
        say_interrupted()
        _leave(130)
    with suppress(KeyboardInterrupt):  # by a user who does not wait for rank 0
        _say_once(sentence)
    _leave(2)


def _leave(code: int) -> None:
    """End the process; without Python's clean-up if it was in a process group, since a thread of gloo that outlives its
    group may abort the process during clean-up."""
    close_streams()
    launch = sys.modules.get("dtgpt.parallel.launch")
    if launch is None or not launch.was_in_group:
        sys.exit(code)
    os._exit(code)


def _say_once(sentence: str) -> None:
    """Print `sentence`. Ranks other than 0 wait first: the first process that exits makes torchrun end the others, and
    rank 0 should be heard."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(RANK_0_FIRST)
        sentence = f"rank {rank}: {sentence}"
    say_error(f"dtgpt: {sentence}")
    for tell in seams.listed("failures"):
        tell(f"dtgpt: {sentence}")


# Here, and not in `main`: a recipe file imports torch, which takes seconds, before it calls anything.
for begin in seams.listed("program_starts"):
    if refused := begin():
        prepare_streams()
        _say_once(refused)
        sys.exit(2)

if __name__ == "__main__":
    main()
