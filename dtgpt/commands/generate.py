"""`dtgpt generate`: continue texts with a model.

Options of sampling are not written here: `sampling_words` makes them from those that `dtgpt.inference` declares, so
that the command, the server and `Model.generate` have the same names, bounds and errors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dtgpt.commands.command import Command
from dtgpt.commands.model_options import Addend, OpenOptions, open_as_asked
from dtgpt.config.execution import MOST_SLOTS
from dtgpt.inference.engine import Engine
from dtgpt.inference.model import Model, Need, need_of
from dtgpt.inference.options import INITIAL, OPTIONS, read_options
from dtgpt.inference.prompts import encode
from dtgpt.inference.request import Completion, PromptJob
from dtgpt.util import seams
from dtgpt.util.console import say_error, write
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.hardware import memory_errors_as_user_errors

NEW_TOKENS: int = INITIAL["max_new_tokens"]  # where nothing is said of it
NOT_WORDS = "do_sample", "top_logprobs", "prompt_logprobs"  # options that the command does not have
RENAMED = {"num_return_sequences": "num_samples"}


def sampling_words() -> Any:
    """Return a dataclass of the options that `dtgpt.inference` declares for this command. Ids and biases are words; no
    `max_new_tokens` stands for the initial number, or for as many as the model has positions for."""
    found = []
    for option in OPTIONS.values():
        if option.name in NOT_WORDS:
            continue
        type_, default, text = option.kind, INITIAL.get(option.name, option.default), option.help
        if option.values is not None:
            type_, default, text = tuple[str, ...], (), f"{text}{option.values.form}"
        if option.name == "max_new_tokens":
            type_, default, text = int | None, None, f"{text}; none: {NEW_TOKENS}"
        bounds = Bounds(option.least, option.most)
        rules = (bounds,) if option.kind in (int, float) else ()
        found.append((RENAMED.get(option.name, option.name), Annotated[type_, text, *rules], field(default=default)))
    return make_dataclass("SamplingWords", found, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Where prompts come from and where texts go."""

    prompt: Annotated[str, "text to continue; empty: begin a document"] = ""


@dataclass(frozen=True, kw_only=True)
class Execution(OpenOptions):
    """How the model runs."""

    adapter: Addend = None
    slots: Annotated[
        int | None, f"texts at the same time; none: as many as needed, up to {MOST_SLOTS}", Bounds(1, MOST_SLOTS)
    ] = None


SamplingWords: Any = sampling_words()
HEADINGS = {name: heading for more in seams.listed("options") for name, heading in more.headings.items()}
MORE = seams.listed("prompt_options")  # dataclasses of more options, whose `chosen` returns what generates by them
MoreOptions: Any = type("MoreOptions", (*MORE, PromptOptions), {})


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Execution, SamplingWords, MoreOptions):  # fields are listed from the last base on
    """Continue texts with a model. MODEL is a run folder, whose newest checkpoint is used, or any model that `dtgpt
    convert` reads. Under torchrun, the processes share the model by a plan.

    A text depends on the prompt, its number in the file, the options and the seed, and not on other prompts or the
    plan.
    """

    headings: ClassVar[dict[str, str]] = {  # in `--help`, from the named field on
        "prompt": "prompts and results",
        "max_new_tokens": "sampling",
        "stop_token_ids": "end of a text",
        "do_sample": "sampling",
        "num_samples": "several texts, beam search",
        "split_special_tokens": "prompts and results",
        **HEADINGS,
        "plan": "execution",
        "tokenizer": "tokenizer",
        "adapter": "execution",
    }


@memory_errors_as_user_errors("ask for fewer texts at the same time (--slots) or shorter ones (--max-length)")
def generate(path: Path, options: GenerateOptions) -> None:
    chosen = [more.chosen(options) for more in MORE]  # all of them, since each refuses what contradicts it
    work = next(filter(None, chosen), _show)
    base = sampling_of(options)
    if sentence := seams.ask("explanations", lambda each: each.of_model(path, options)):
        raise UserError(sentence)
    source, settings, mesh, tokenizer = open_as_asked(path, options)
    model = Model.read(source, settings, mesh, path, options.slots, tokenizer, options.exact)
    work(model, base, options)


def sampling_of(options: GenerateOptions) -> dict[str, Any]:
    """Return the options of the command line that `read_options` knows."""
    given = {name: getattr(options, RENAMED.get(name, name)) for name in OPTIONS if name not in NOT_WORDS}
    for name, words in given.items():
        if (values := OPTIONS[name].values) is not None:
            given[name] = values.from_words(f"--{name.replace('_', '-')}", words)
    return given


def make_job(model: Model, prompt: str, given: dict[str, Any], index: int) -> PromptJob:
    """Return the job of a prompt with the options `given` by name. Raise UserError where it cannot be done."""
    OPTIONS["split_special_tokens"].check(given["split_special_tokens"])
    ids = encode(prompt, model.tokenizer, model.config, given["split_special_tokens"])
    job = PromptJob(ids, read_options(given, len(ids), model.config, NEW_TOKENS), index)
    model.check(job)
    return job


def _show(model: Model, base: dict[str, Any], options: GenerateOptions) -> None:
    def prepare() -> tuple[Need, PromptJob]:
        job = make_job(model, options.prompt, base, 0)
        return need_of([job]), job

    def work(engine: Engine, job: PromptJob) -> None:
        model.describe()
        show(engine, options.prompt, job)

    model.run(prepare, work)


def show(engine: Engine, prompt: str, job: PromptJob, stopped: Callable[[], bool] = lambda: False) -> None:
    """Write a prompt and its continuation to stdout as it is generated, or several when all are complete. `stopped`:
    whether to end with what there is."""
    several, found = job.rows > 1, list[Completion]()
    if not several:
        write(prompt)
    try:
        for update in engine.stream(job, stopped):
            found += update.completions or []
            if not several:
                write(update.text)
    finally:
        if not several:
            write("\n")
    if several:
        for place, one in enumerate(found, 1):
            scored = "" if one.score is None else f", score {one.score:.4f}"
            write(f"--- {place} of {len(found)}{scored}\n{prompt}{one.text or ''}\n")
    if any(one.finish_reason == "length" and len(one.ids) < job.options.max_new_tokens for one in found):
        say_error("the text ends early: the options, such as --no-repeat-ngram-size, left no token to draw")


command = Command(
    usage="generate MODEL",
    options=GenerateOptions,
    work=generate,
    example="runs/gpt2_tiny-001 --prompt Hello",
    aliases={"tokens": "max_new_tokens", "num_return_sequences": "num_samples"},
)
