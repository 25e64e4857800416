"""The `dtgpt` command and the entry point of recipe files."""

import difflib
import getpass
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtgpt.commands.help import HELP
from dtgpt.run.signals import follow_launcher, interrupt_imports, say_interrupted
from dtgpt.util.console import close_streams, prepare_streams, say, say_error
from dtgpt.util.errors import UserError, sentence_of, shown

interrupt_imports()  # here, since a recipe file imports torch for seconds before it calls anything

COMMANDS = (
    "prepare", "tokenizer", "train", "plan", "compare", "generate", "chat", "serve", "eval", "lm-eval", "convert",
    "translate", "inspect", "plot", "recipe", "doctor",
)  # fmt: skip
RANK_0_FIRST = 5.0  # seconds for rank 0 to say first why the run ends
USAGE = """usage: dtgpt COMMAND ...     (dtgpt COMMAND --help lists the options of COMMAND)

  dtgpt prepare INPUT ... --output-prefix PREFIX
      encode text into Megatron-LM's PREFIX_text_document.bin and .idx
  dtgpt tokenizer train INPUT ...
      train a byte-level BPE on your own text
  dtgpt doctor
      check this machine: torch, GPUs, what they run, what is missing
  dtgpt recipe [NAME]
      print a recipe file that comes with dtgpt; without NAME, list them
  dtgpt train RECIPE.py [--nproc N] [--option value ...]
      train a model; with --nproc N, in N processes of this machine
  dtgpt plan RECIPE.py [--plan NAME] [--world N] [--gpu NAME]
      show memory, messages and pipeline bubble of a plan; no GPU is needed
  dtgpt compare RECIPE.py --plans NAME [NAME ...] [--steps N]
      run the same steps under several plans and on one process, and compare
  dtgpt compare RUN_A RUN_B [--output FILE.png]
      show where the curves of two runs part, and in what the runs differ
  dtgpt generate MODEL [--prompt TEXT | --prompts-file FILE | --interactive]
      continue texts with a run's newest checkpoint or another model
  dtgpt chat MODEL [--system TEXT]
      talk to a model whose tokenizer has a chat template
  dtgpt serve MODEL [--host ADDRESS] [--port N]
      answer Megatron-LM's and OpenAI's clients over HTTP, and a web page
  dtgpt eval MODEL --task lambada|wikitext103|hellaswag --data FILE
      measure a model on tasks with known answers
  dtgpt lm-eval MODEL --tasks NAME[,NAME ...]
      evaluate a model with lm-evaluation-harness
  dtgpt convert MODEL TARGET --to hf|megatron|dtgpt
      convert from and to Hugging Face and Megatron-LM; from nanoGPT and llm.c
  dtgpt translate SCRIPT.sh | -- COMMAND
      make a recipe of a command of Megatron-LM, nanoGPT or llm.c
  dtgpt inspect MODEL | PREFIX
      verify and describe a checkpoint or model; describe token files
  dtgpt plot RUN [RUN ...] [--output FILE.png]
      draw the loss curves of runs into one picture
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the `dtgpt` command, and exit."""
    words = _without_rank(sys.argv[1:] if arguments is None else arguments)
    _exit(lambda: _command(words))


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
        say(USAGE.rstrip())
        return 0
    name, *rest = words
    if name == "--version":
        from dtgpt.util.environment import describe_versions

        say(describe_versions())
        return 0
    if name == "record":
        from dtgpt.commands.compare import record

        return record(rest)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
        advice = f"did you mean dtgpt {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {shown(name)}; {advice}")
    return importlib.import_module(f"dtgpt.commands.{name.replace('-', '_')}").command(rest)


def _exit(work: Callable[[], int]) -> None:
    """Exit with the code that `work` returns, or with code 2 and one sentence on stderr about the user's mistake."""
    prepare_streams()
    follow_launcher()
    _name_user()
    try:
        _leave(work())
    except UserError as error:
        sentence = str(error)
    except OSError as error:
        if (told := sentence_of(error)) is None:
            raise
        sentence = told
    except KeyboardInterrupt:
        say_interrupted()
        _leave(130)
    with suppress(KeyboardInterrupt):  # by a user who does not wait for rank 0
        _say_once(sentence)
    _leave(2)


def _name_user() -> None:
    """Set $USER in containers where the user has no name: torch.compile and others name folders by it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid{os.getuid()}"


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
    _hand_to_torchrun(f"dtgpt: {sentence}")


def _hand_to_torchrun(sentence: str) -> None:
    """Let torchrun's report of the process that failed first end with `sentence`, in place of advice on tracebacks."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(report))


def _check_current_folder() -> None:
    """Exit where the current folder was removed. torch ends a process there at its import, with a sentence about a
    library that cannot be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        prepare_streams()
        _say_once("the current folder was removed; go to one that exists (cd), and start again")
        sys.exit(2)


_check_current_folder()  # here, before a recipe file imports torch

if __name__ == "__main__":
    main()
