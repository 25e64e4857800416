"""The `dtgpt` command and the entry point of recipe files."""

import difflib
import getpass
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Annotated

import dtgpt
from dtgpt.console import close_streams, prepare_streams, say, say_error
from dtgpt.errors import UserError, remedy, shown
from dtgpt.help import HELP, help_text, wants_help
from dtgpt.overrides import read_words, take
from dtgpt.signals import follow_launcher, interrupt_imports, say_interrupted

interrupt_imports()  # here, since a recipe file imports torch for seconds before it calls anything

RANK_0_FIRST = 5.0  # seconds in which rank 0 may say why the run ends
LONGEST_PATH = 4096  # characters of any path that can exist
USAGE = """usage: dtgpt COMMAND ...     (dtgpt COMMAND --help lists the options of COMMAND)

  dtgpt prepare INPUT ... --output-prefix PREFIX
      encode text into Megatron-LM's PREFIX_text_document.bin and .idx
  dtgpt tokenizer train INPUT ...
      train a byte-level BPE on your own text
  dtgpt train RECIPE.py [--option value ...]
      train a model; `torchrun RECIPE.py` does the same in several processes
  dtgpt plan RECIPE.py [--plan NAME] [--world N] [--gpu NAME]
      show memory, messages and bubble of a plan; no GPU is needed
  dtgpt compare RECIPE.py --plans NAME [NAME ...] [--steps N]
      run the same steps under each plan and on one process, and compare
  dtgpt generate RUN [--prompt TEXT]
      continue a text with the newest checkpoint of a run, or with another model
  dtgpt convert MODEL TARGET --to hf|megatron|dtgpt
      convert from and to Hugging Face and Megatron-LM; from nanoGPT and llm.c
  dtgpt inspect MODEL | PREFIX
      verify and describe a checkpoint or model; describe token files
  dtgpt plot RUN [RUN ...] [--output FILE.png]
      draw the loss curves of runs into one picture
"""
NEEDS = {  # what a command needs, and an example
    "generate": ("RUN", "runs/gpt2_tiny-001 --prompt Hello"),
    "convert": ("MODEL TARGET", "runs/gpt2_tiny-001 exported --to hf"),
    "plot": ("run folders", "runs/gpt2_tiny-001 runs/gpt2_tiny-002"),
}


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw the training and held-out losses of run folders into one picture."""

    output: Annotated[str, "picture to write, a .png"] = "loss.png"


def main(arguments: list[str] | None = None) -> None:
    """The `dtgpt` command."""
    words = sys.argv[1:] if arguments is None else arguments
    _exit(lambda: _command(words))


def _command(words: list[str]) -> int:
    commands = {
        "prepare": _prepare,
        "tokenizer": _tokenizer,
        "train": _train,
        "plan": _plan,
        "compare": _compare,
        "record": _record,
        "generate": _generate,
        "convert": _convert,
        "inspect": _inspect,
        "plot": _plot,
    }
    if not words or words[0] in (*HELP, "help"):
        say(USAGE.rstrip())
        return 0
    if words[0] == "--version":
        say(f"dtgpt {dtgpt.__version__}")
        return 0
    if words[0] not in commands:
        del commands["record"]  # which only dtgpt compare uses
        near = difflib.get_close_matches(words[0].lower(), commands, n=1)
        remedy = f"did you mean dtgpt {near[0]}?" if near else f"use one of {', '.join(commands)}"
        raise UserError(f"there is no command {shown(words[0])}; {remedy}")
    return commands[words[0]](words[1:])


def run_recipe(recipe_function: Callable, doc: str, arguments: list[str] | None = None) -> None:
    """What a recipe file calls at its end: train `recipe_function()` with the overrides of the command line."""
    _exit(lambda: _run(recipe_function, doc, sys.argv[1:] if arguments is None else arguments))


def _exit(work: Callable[[], int]) -> None:
    """Exit with the code that `work` returns; what the user can mend is one sentence on stderr and exit code 2."""
    prepare_streams()
    follow_launcher()
    _name_user()
    try:
        _leave(work())
    except UserError as error:
        sentence = str(error)
    except OSError as error:
        if not remedy(error):
            raise
        name = str(error.filename or "")
        place = f"{name if len(name) <= LONGEST_PATH else shown(name)}: " if name else ""
        sentence = f"{place}{error.strerror}; {remedy(error)}"
    except KeyboardInterrupt:
        say_interrupted()
        _leave(130)
    with suppress(KeyboardInterrupt):  # who cannot wait for rank 0
        _say_once(sentence)
    _leave(2)


def _name_user() -> None:
    """torch.compile and others name their folders by the user, who has no name in some containers."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid{os.getuid()}"


def _leave(code: int) -> None:
    """End the process; at once where it was in a process group: a thread of gloo that outlives its group may abort a
    process that Python takes apart."""
    close_streams()
    launch = sys.modules.get("dtgpt.parallel.launch")
    if launch is None or not launch.was_in_group:
        sys.exit(code)
    os._exit(code)


def _say_once(sentence: str) -> None:
    """On rank 0, or on another rank where rank 0 has nothing to say: whoever exits first makes torchrun end the others,
    so the others wait."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(RANK_0_FIRST)
        sentence = f"rank {rank}: {sentence}"
    say_error(f"dtgpt: {sentence}")


def _run(recipe_function: Callable, doc: str, arguments: list[str]) -> int:
    from dtgpt.parallel.process import Process
    from dtgpt.recipe_file import call_recipe, override
    from dtgpt.train.settle import plan_error

    recipe = call_recipe(recipe_function)
    if wants_help(arguments):
        say(help_text(recipe, doc or "", f"torchrun recipes/{recipe.name}.py"))
        return 0
    recipe = override(recipe, arguments)
    # What is wrong with the recipe or its plan is told before seconds go into importing the rest.
    recipe.validate()
    try:
        recipe.plan_for(Process.from_environment().world)
    except UserError as error:
        raise plan_error(error, recipe) from None
    from dtgpt.train.loop import train

    return train(recipe)


def _train(words: list[str]) -> int:
    if words and words[0] in HELP:
        from dtgpt.recipe_commands import recipe_help

        return recipe_help("train", words)
    from dtgpt.recipe_file import recipe_module

    module = recipe_module(words, "train")
    return _run(module.recipe, module.__doc__ or "", words[1:])


def _prepare(words: list[str]) -> int:
    from dtgpt.prepare.command import prepare_command

    return prepare_command(words)


def _tokenizer(words: list[str]) -> int:
    from dtgpt.prepare.command import tokenizer_command

    return tokenizer_command(words)


def _plan(words: list[str]) -> int:
    from dtgpt.recipe_commands import plan_command

    return plan_command(words)


def _compare(words: list[str]) -> int:
    from dtgpt.recipe_commands import compare_command

    return compare_command(words)


def _record(words: list[str]) -> int:
    from dtgpt.recipe_commands import record_command

    return record_command(words)


def _generate(words: list[str]) -> int:
    from dtgpt.generate import GenerateConfig, generate_from

    taken = _paths_and_config(words, "generate RUN", GenerateConfig)
    if taken:
        say(generate_from(*taken))
    return 0


def _convert(words: list[str]) -> int:
    from dtgpt.interop.convert import ConvertConfig, convert

    taken = _paths_and_config(words, "convert MODEL TARGET", ConvertConfig)
    if taken:
        convert(*taken)
    return 0


def _inspect(words: list[str]) -> int:
    from dtgpt.prepare.inspect import inspect_command

    return inspect_command(words)


def _plot(words: list[str]) -> int:
    taken = _paths_and_config(words, "plot RUN ...", PlotOptions)
    if taken:
        from dtgpt.plot import plot_runs

        *runs, own = taken
        plot_runs(runs, Path(own.output))
        say(own.output)
    return 0


def _paths_and_config(words: list[str], usage: str, config: type) -> list | None:
    """The paths that `usage` names in capitals, then a `config()` with the options; None where help was asked for, and
    given."""
    if wants_help(words):
        say(help_text(config, getdoc(config), f"dtgpt {usage}"))
        return None
    paths, options = read_words(words, config, free=True)
    command, *wanted = usage.split()
    several, (needs, example) = wanted[-1] == "...", NEEDS[command]
    if not paths or (not several and len(paths) < len(wanted)):
        raise UserError(f"dtgpt {command} needs {needs}, such as dtgpt {command} {example}")
    if not several and len(paths) > len(wanted):
        raise UserError(f"{paths[len(wanted)]!r} is not an option, and dtgpt {command} takes {needs} alone")
    return [*map(Path, paths), take(config(), options)]


if __name__ == "__main__":
    main()
