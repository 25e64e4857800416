"""`dtgpt lm-eval`: the tasks of lm-evaluation-harness on a model."""

from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from dtgpt.commands.command import Command, wants_help
from dtgpt.commands.model_options import OpenOptions
from dtgpt.config.execution import MOST_SLOTS
from dtgpt.evaluation.shared_model import open_shared
from dtgpt.posttrain.chats.messages import ARGUMENTS, arguments_of_words
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.field_types import Bounds
from dtgpt.util.hardware import memory_errors_as_user_errors
from dtgpt.util.peers import Process

TAKEN = {
    "--model": "the first word",
    "-M": "the first word",
    "--model_args": "options such as --plan and --precision",
    "-a": "options such as --plan and --precision",
}
NAMING_TASKS = ("--ta", "-t", "--co", "-C")  # --tasks and --config, which the harness takes in short forms


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(OpenOptions):
    """Evaluate a model with lm-evaluation-harness. MODEL is a run folder, whose newest checkpoint is used, or any model
    that `dtgpt convert` reads. Under torchrun, the processes share the model by a plan.

    All other options are those of `lm-eval run`, except --model and --model_args, and go to its own command: --tasks,
    --num_fewshot, --limit, --output_path, --log_samples, --include_path, --gen_kwargs, --use_cache and more. `lm-eval
    ls tasks` lists the tasks. --batch_size is the number of samples of full length in a batch; auto, the default, keeps
    the device busy.
    """

    slots: Annotated[
        int | None,
        f"texts that are generated at the same time; none: as many as needed, up to {MOST_SLOTS}",
        Bounds(1, MOST_SLOTS),
    ] = None
    chat_template_kwargs: Annotated[
        str, "variables of the template of --apply_chat_template as JSON, such as '{\"enable_thinking\": false}'"
    ] = ""


OWN = frozenset(field.name for field in fields(LmEvalOptions))


class HarnessCommand(Command):
    """A command whose words are in part options of another program."""

    def __call__(self, words: list[str]) -> int:
        if wants_help(words):
            return super().__call__(words)
        own, passed = split_words(words)
        (path,), options = self.read(own)
        if not any(word.startswith(NAMING_TASKS) for word in passed):
            raise UserError(f"dtgpt lm-eval needs --tasks, such as dtgpt lm-eval {self.example}")
        return evaluate(path, options, passed)


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of `dtgpt lm-eval`, the model first, and those of the harness. Raise UserError for an option of
    the harness that says which model it is."""
    own, passed, rest = words[:1], [], iter(words[1:])
    if own and own[0].startswith("-"):
        raise UserError(
            f"dtgpt lm-eval needs MODEL before {shown_name(own[0])}, such as dtgpt lm-eval {command.example}"
        )
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("--"):  # dashes are the same as underlines in dtgpt, not in the harness
            name = f"--{name[2:].replace('-', '_')}"
        if name in TAKEN:
            raise UserError(f"{name} is not an option of dtgpt lm-eval, which takes the model from {TAKEN[name]}")
        if name.startswith("--") and name[2:] in OWN:
            own += [word] if equals else [word, *[given for given in [next(rest, None)] if given is not None]]
        else:
            passed.append(f"{name}{equals}{value}")
    return own, passed


@memory_errors_as_user_errors("use a smaller --batch_size, or fewer texts at the same time (--slots)")
def evaluate(path: Path, options: LmEvalOptions, words: list[str]) -> int:
    """Run the harness on rank 0 with its options `words`; other ranks follow."""
    if find_spec("lm_eval") is None:
        raise UserError("dtgpt lm-eval needs the package lm_eval; run pip install 'dtgpt[eval]'")
    usual = asdict(LmEvalOptions())
    given = {"model": str(path), **{name: value for name, value in asdict(options).items() if value != usual[name]}}
    arguments_of_words(options.chat_template_kwargs)  # a wrong one ends all ranks
    if Process.from_environment().rank:
        given.pop(ARGUMENTS, None)  # rank 0 alone renders
        open_shared(**given).follow()
        return 0
    from dtgpt.evaluation.harness import run_harness

    run_harness(words, given)
    return 0


command = HarnessCommand(
    "lm-eval MODEL", LmEvalOptions, evaluate, "runs/gpt2_tiny-001 --tasks lambada_openai,hellaswag"
)
