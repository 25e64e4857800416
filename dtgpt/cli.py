"""The `dtgpt` command and the entry point of recipe files."""

import difflib
import errno
import getpass
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import dtgpt
from dtgpt.console import close_streams, prepare_streams, say, say_error
from dtgpt.errors import UserError
from dtgpt.signals import follow_launcher, interrupt_imports, say_interrupted

interrupt_imports()  # here, since a recipe file imports torch for seconds before it calls anything

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
RANK_0_FIRST = 5.0  # seconds in which rank 0 may say why the run ends
EXAMPLES = {"world": "8", "gpu": "H200", "steps": "5", "tolerance": "1e-5"}
HELP = ("-h", "--help")
USAGE = """usage: dtgpt COMMAND ...

  dtgpt prepare INPUT ... --output-prefix PREFIX [--append-eod] [--tokenizer NAME] [--workers N]
                                                text to Megatron-LM's PREFIX_text_document.bin and .idx
  dtgpt tokenizer train INPUT ... [--vocab-size N] [--output FILE]
                                                a byte-level BPE of your own
  dtgpt train RECIPE.py [--option value ...]    train; `torchrun RECIPE.py` does the same (--help lists the options)
  dtgpt plan RECIPE.py [--plan NAME] [--world N] [--gpu NAME] [--option value ...]
                                                memory, messages and bubble of a plan; no GPU is needed
  dtgpt compare RECIPE.py --plans NAME [NAME ...] --steps N [--tolerance X] [--option value ...]
                                                run the same steps under each plan and under none, and compare
  dtgpt generate RUN [--prompt TEXT ...]        continue a text with a run's newest checkpoint, or another model
  dtgpt convert MODEL TARGET --to hf|megatron|dtgpt
                                                from and to Hugging Face and Megatron-LM; from nanoGPT and llm.c
  dtgpt inspect MODEL [--tensors on]            step, plan, sizes, parameters and digests; every file is verified
  dtgpt inspect PREFIX [--digest --split 949,50,1 --seq-length 1024 --num-samples N --seed 1234]
                                                token files: statistics, or digests of samples in Megatron-LM's order
  dtgpt plot RUN [RUN ...] [--output FILE.png]  draw the loss curves of runs into one picture
"""


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
        raise UserError(f"there is no command {words[0][:60]!r}; {remedy}")
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
        if error.errno not in REMEDIES:
            raise
        place = f"{error.filename}: " if error.filename else ""
        sentence = f"{place}{error.strerror}; {REMEDIES[error.errno]}"
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
    from dtgpt.overrides import apply_overrides, help_text
    from dtgpt.parallel.process import Process
    from dtgpt.recipe_file import call_recipe

    recipe = call_recipe(recipe_function)
    if any(word in HELP for word in arguments):
        say(help_text(recipe, doc or "", f"torchrun recipes/{recipe.name}.py"))
        return 0
    recipe = apply_overrides(recipe, arguments)
    # What is wrong with the recipe or its plan is told before seconds go into importing the rest.
    recipe.validate()
    recipe.plan_for(Process.from_environment().world)
    from dtgpt.train import train

    return train(recipe)


def _train(words: list[str]) -> int:
    if words and words[0] in HELP:
        say(USAGE.rstrip())
        return 0
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
    if any(word in HELP for word in words):
        say(USAGE.rstrip())
        return 0
    from dtgpt.recipe_file import load_recipe, recipe_module

    recipe_module(words, "plan")
    own, options = _take_options(words[1:], {"world": 1, "gpu": 1})
    world, gpu = own.get("world"), own.get("gpu")
    if world and not re.fullmatch("[1-9][0-9]{0,8}", world[0]):
        raise UserError(f"--world {world[0][:60]} is no number of processes; use 1 or more")
    from dtgpt.dryrun import describe_plan

    recipe = load_recipe(Path(words[0]), options)
    say(describe_plan(recipe, int(world[0]) if world else None, gpu[0] if gpu else None))
    return 0


def _compare(words: list[str]) -> int:
    if any(word in HELP for word in words):
        say(USAGE.rstrip())
        return 0
    from dtgpt.recipe_file import load_recipe, recipe_module

    recipe_module(words, "compare")
    own, options = _take_options(words[1:], {"plans": None, "plan": None, "steps": 1, "tolerance": 1})
    if "plan" in own:
        raise UserError("dtgpt compare takes several plans; write --plans")
    if not own.get("plans"):
        raise UserError("dtgpt compare needs plans, such as --plans tp2 pp2 tp2_pp2")
    try:
        steps, tolerance = int(own.get("steps", ["5"])[0]), float(own["tolerance"][0]) if "tolerance" in own else None
    except ValueError:
        raise UserError("dtgpt compare needs numbers, such as --steps 5 --tolerance 1e-5") from None
    from dtgpt.compare import compare

    path = Path(words[0])
    return compare(load_recipe(path, options), path, own["plans"], steps, tolerance, options)


def _record(words: list[str]) -> int:
    """RECIPE.py FILE STEPS, then overrides: what dtgpt compare starts in the processes of a plan."""
    from dtgpt.compare import save_record
    from dtgpt.recipe_file import load_recipe

    if len(words) < 3:
        raise UserError("dtgpt record is what dtgpt compare starts; use dtgpt compare")
    path, file, steps, *options = words
    return save_record(load_recipe(Path(path), options), Path(file), int(steps))


def _take_options(words: list[str], counts: dict[str, int | None]) -> tuple[dict[str, list[str]], list[str]]:
    """({name: its words} for the options named in `counts`, all other words). A count is how many words the option
    takes, None any number. Of an option that is given twice the last counts."""
    own: dict[str, list[str]] = {}
    rest: list[str] = []
    into = rest
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            into = rest
            if name in counts:
                into = own[name] = [value] if equals else []
                continue
        into.append(word)
    for name, given in own.items():
        if counts[name] not in (None, len(given)):
            raise UserError(f"--{name} takes one value, not {len(given)}; give one, as in --{name} {EXAMPLES[name]}")
    return own, rest


def _generate(words: list[str]) -> int:
    from dtgpt.generate import GenerateConfig, generate_from

    taken = _paths_and_config(words, "generate RUN", GenerateConfig, generate_from.__doc__)
    if taken:
        say(generate_from(*taken))
    return 0


def _convert(words: list[str]) -> int:
    from dtgpt.interop.convert import ConvertConfig, convert

    taken = _paths_and_config(words, "convert MODEL TARGET", ConvertConfig, convert.__doc__)
    if taken:
        convert(*taken)
    return 0


def _inspect(words: list[str]) -> int:
    from dtgpt.prepare.inspect import inspect_command

    return inspect_command(words)


def _paths_and_config(words: list[str], usage: str, config: Callable, doc: str) -> list | None:
    """The paths that `usage` names in capitals, then a `config()` with the options after them; None where help was
    asked for, and given."""
    from dtgpt.overrides import apply_overrides, help_text

    if any(word in HELP for word in words):
        say(help_text(config(), doc, f"dtgpt {usage}"))
        return None
    count = len(usage.split()) - 1
    paths = words[:count]
    if len(paths) < count or any(path.startswith("-") for path in paths):
        example = {"generate": "--prompt Hello", "convert": "exported --to hf"}
        command = usage.split()[0]
        such = f"runs/gpt2_tiny-001 {example[command]}"
        raise UserError(f"dtgpt {command} needs {usage.partition(' ')[2]}, such as dtgpt {command} {such}")
    return [*map(Path, paths), apply_overrides(config(), words[count:])]


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


if __name__ == "__main__":
    main()
