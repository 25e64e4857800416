"""The seams at which capabilities hang on the core.

A capability could register itself where it is imported. But then it has to be imported, with all that it needs, to be
known. A description names its parts as text, and a part is imported where a run needs it: a plain run loads a third of
the modules (`python -m tests.support.core`).

The core does not import a capability. `dtgpt/capabilities.py` lists the modules that describe one, each by a
`Capability` named CAPABILITY; whoever imports `dtgpt` has them all. The core asks for what they add at a seam with
`added` and `listed`, and works the same without any.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from dtgpt.util.errors import UserError


class CommandEntry(NamedTuple):
    """`dtgpt NAME`, and what the list of commands says of it."""

    part: str  # what is called with the words after the name, and returns the exit code: a `command.Command`
    usage: str = ""  # its lines in the list; none: it is for dtgpt itself
    place: int = 1000  # in the list


class When(NamedTuple):
    """A part that is imported only where one of the `options` is on: a field of what the core asks with, by its dotted
    name, or NAME=VALUE."""

    part: str
    options: tuple[str, ...]

    def is_on(self, given: Any) -> bool:
        """Return whether one of them is on in a recipe, or in the section whose fields they name."""
        named = (option.partition("=") for option in self.options)
        return any(
            attrgetter(name)(given) == value if equals else attrgetter(name)(given) not in OFF
            for name, equals, value in named
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of `dtgpt train` beside those of a recipe, by which it may start the run in other processes. Here: none,
    and the run is in this process, or in those of torchrun. aliases: other names of the options."""

    aliases: ClassVar[Mapping[str, str]] = {}

    @property
    def next_word(self) -> str:
        """The option that starts as many processes as are written after it, where that would help; else empty."""
        return ""

    def start(self, words: list[str], check: Callable[[int], object]) -> int | None:
        """Run `python WORDS` in the processes that the options ask for, and return the exit code; None where this
        process is to train. check: raises UserError where a number of processes cannot. Raises UserError."""
        return None


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a capability adds. Each part is 'module:object', and is imported when the core first needs it."""

    public: Mapping[str, str] = field(default_factory=dict)  # what `import dtgpt` gives, by its name
    sections: Mapping[str, str] = field(default_factory=dict)  # of a recipe: the class of a field, by its name
    rampups: tuple[str, ...] = ()  # of a recipe's batch size: a class that derives from `schedule.BatchSizes`
    precisions: Mapping[str, str] = field(default_factory=dict)  # of a recipe: a `sections.Precision`, by its name
    schedules: Mapping[str, str] = field(default_factory=dict)  # of learning rates: a `schedule.Schedule`, by its name
    commands: Mapping[str, CommandEntry] = field(default_factory=dict)  # `dtgpt NAME`, by its name
    option_help: tuple[str, ...] = ()  # what `--help` says of options: `commands.option_help.text.describe`
    # Where a section freezes weights: the modules of a stage that are trained, and their initial values.
    added_modules: tuple[str, ...] = ()
    initial_values: tuple[str, ...] = ()
    build: tuple[str | When, ...] = ()  # what is done to a stage as it is built: a `parallel.build.Entry`
    batch_parts: tuple[str, ...] = ()  # of a rank, where ranks share samples: from a whole batch and the rank's place
    cp_groups: tuple[str, ...] = ()  # of the ranks that share a sample: what makes them for a mesh
    degrees: Mapping[str, str] = field(default_factory=dict)  # fields of plans: what checks one, by its name
    own_styles: tuple[str, ...] = ()  # of a plan's own table of modules: what joins them to the default ones
    role_styles: Mapping[str, str] = field(default_factory=dict)  # of a role: what makes its `ParallelStyle`, by name
    activations: tuple[str, ...] = ()  # of MLPs: what finds one, like `ops.activations.activation`
    rotary_scalings: tuple[str, ...] = ()  # of positions: frequencies, for a `Rotation` and its waves
    head_degrees: tuple[str, ...] = ()  # of blocks, under a plan with a table: what finds the ranks that cut heads
    table_tests: tuple[str, ...] = ()  # of an engine whose plan has a table, with its settings, before the first step
    sums: Mapping[str, str] = field(
        default_factory=dict
    )  # of gradients: a `parallel.gradients.Sums`, by a recipe's `reduce`
    transports: tuple[str, ...] = ()  # a way between ranks: a `parallel.collectives.Transport`
    inference_stages: tuple[str, ...] = ()  # of a rank: what makes them, like `parallel.inference.inference_stages`
    architectures: Mapping[str, str] = field(default_factory=dict)  # the class of a model's config, by its name
    optimizers: Mapping[str, str] = field(default_factory=dict)  # the class of an optimizer's config, by its kind
    objectives: Mapping[str, str] = field(
        default_factory=dict
    )  # what a run learns: its class, by the option that turns it on
    step_states: tuple[str | When, ...] = ()  # what a step keeps for the next one: what makes it, or returns None
    entries: Mapping[str, str] = field(default_factory=dict)  # of a checkpoint: what checks the entry of this name
    launches: tuple[str, ...] = ()  # the processes of a run: the class of a `Launch`, one at most
    watches: tuple[str, ...] = ()  # begun as the program begins, before it knows its command: called without arguments
    peers: tuple[str, ...] = ()  # how processes find and watch each other: a `Peers`
    beginnings: tuple[str, ...] = ()  # a run with other weights than new ones: what makes a `train.start.Beginning`
    bases: tuple[str, ...] = ()  # weights that checkpoints leave out: a `train.init_from.begin.Base`
    timers: tuple[str | When, ...] = ()  # of the parts of a step: a class that derives from `parallel.engine.Timers`
    graphs: tuple[str, ...] = ()  # what replays pieces of a step: a class that derives from `parallel.engine.Graphs`
    locks: tuple[str, ...] = ()  # of files: a class that derives from `util.storage.FileLock`
    verifications: tuple[str, ...] = ()  # of checkpoints: a `checkpoint.shard_file.Verification`
    savers: tuple[str, ...] = ()  # of checkpoints: a class that derives from `checkpoint.save.Saver`
    observers: tuple[str | When, ...] = ()  # what happens between steps
    former_starts: tuple[
        str, ...
    ] = ()  # what keeps what a start of a run was, when another one begins: see `describe_run`
    # Of a run that goes on: what says in which values its recipe file differs, lists those that change, and refuses a
    # path of data that are not here.
    kept_values: tuple[str, ...] = ()
    changed_values: tuple[str, ...] = ()
    kept_data: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # weights of other libraries
    datasets: tuple[str, ...] = ()  # data that are no plain text
    # What makes tokens of lines of messages: a `data.prepare.encode.MessageFormat`, by the option that asks for it.
    encoders: Mapping[str, str] = field(default_factory=dict)
    tokenizers: tuple[str, ...] = ()  # tokenizers of other libraries
    caches: tuple[str, ...] = ()  # of the tokens of texts, one at most: a function like `data.cached.text.keep_tokens`
    memory_checks: tuple[str, ...] = ()  # before a rank allocates: of settings, rank and ranks of its node
    places: tuple[str, ...] = ()  # from a name that is no path, to the path of what it names; None: of others
    near_paths: tuple[str, ...] = ()  # finds a path like one that does not exist
    cpu_starts: tuple[str, ...] = ()  # called before a run on a CPU allocates
    foreign_models: tuple[str, ...] = ()  # says what to do with a checkpoint of a class that is not here
    core_sizes: tuple[str, ...] = ()  # of a block's attention cores that do not say theirs: what measures them
    memory_errors: tuple[str, ...] = ()  # a context in which they are told, with a remedy
    peaks: tuple[str, ...] = ()  # of a device and a type: FLOP/s, or None
    flat_sums: tuple[str, ...] = ()  # of 16-bit numbers: a class that derives from `parallel.collectives.FlatSum`
    device_checks: tuple[str, ...] = ()  # of a GPU: raises UserError where this torch cannot compute on it
    device_notes: tuple[str, ...] = ()  # of `Settings` on a GPU: what a user should know, or None
    plan_choices: tuple[str, ...] = ()  # the recipe with a plan, for a recipe with `auto` and a number of processes
    alternatives: Mapping[str, str] = field(default_factory=dict)  # of a plan: what can `parse` them, and `choose` one
    sharings: tuple[str, ...] = ()  # of the tokens of a row by samples: a `models.layers.Sharing` for `Batch.copies`
    prompt_options: tuple[str, ...] = ()  # of `dtgpt generate`: a dataclass of options, with a function `chosen`
    options: tuple[str, ...] = ()  # of a prompt: a class that derives from `inference.base_options.BaseOptions`
    exact_bits: tuple[str, ...] = ()  # of training's forward pass: an `inference.step.ExactBits`
    rank_steps: tuple[str, ...] = ()  # of generation: a class that derives from `inference.step.Step`, with `serves`
    rank_commands: tuple[str, ...] = ()  # of rank 0 to all ranks that generate: functions as in `inference.commands`
    scorers: tuple[str, ...] = ()  # of the tokens of prompts: an `inference.engine.PromptScorer`
    logit_rules: tuple[str, ...] = ()  # before a token is chosen: a function like `inference.rules.edits.edit`
    text_streams: tuple[str, ...] = ()  # of tokens that depend on others: an `inference.prompts.TextStream`
    explanations: tuple[str, ...] = ()  # `Explanations`
    # What may serve an operation: a sequence of `ops.operation.Kernel`, by the operation's name.
    kernels: Mapping[str, str] = field(default_factory=dict)


OFF = (None, False, 0, "", "off")
_modules: tuple[str, ...] = ()


def use(modules: Iterable[str]) -> None:
    """Let the core have the capabilities that `modules` describe, and no others."""
    global _modules
    _modules = tuple(modules)
    capabilities.cache_clear()


@cache
def capabilities() -> tuple[Capability, ...]:
    """Return the capabilities in use, in the order in which they were named."""
    return tuple(importlib.import_module(module).CAPABILITY for module in _modules)


def load(part: str) -> Any:
    """Return the object that 'module:object' names."""
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(module), name)


def added(seam: str) -> dict[str, Any]:
    """Return the parts that capabilities add at a seam, by name."""
    return {name: part for capability in capabilities() for name, part in getattr(capability, seam).items()}


def first(seam: str, missing: str) -> Any:
    """Return the first object that capabilities add at a seam. Raise UserError with the sentence `missing` for none."""
    for found in listed(seam):
        return found
    raise UserError(missing)


def ask(seam: str, question: Callable[[Any], Any]) -> Any:
    """Return the first answer that is something, of the objects that capabilities add at a seam, in their order; None
    where no answer is."""
    return next(filter(None, map(question, listed(seam))), None)


def listed(seam: str, given: Any = None) -> list[Any]:
    """Return the objects that capabilities add at a seam without names, imported: of those `When` some options are on,
    those that are on in `given`."""
    parts = (part for capability in capabilities() for part in getattr(capability, seam))
    named = (part if isinstance(part, str) else part.part if part.is_on(given) else "" for part in parts)
    return [load(part) for part in named if part]
