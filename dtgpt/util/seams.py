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
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, ClassVar, NamedTuple

from dtgpt.util.errors import UserError


class CommandEntry(NamedTuple):
    """`dtgpt NAME`, and what the list of commands says of it."""

    part: str  # what is called with the words after the name, and returns the exit code: a `command.Command`
    usage: str = ""  # its lines in the list; none: it is for dtgpt itself
    place: int = 1000  # in the list


class When(NamedTuple):
    """A part that is imported only where one of the `options` is on: a field of what the core asks with, by its dotted
    name, or NAME=VALUE. A field that is not there, such as that of some models, is off."""

    part: str
    options: tuple[str, ...]

    def is_on(self, given: Any) -> bool:
        """Return whether one of them is on in a recipe, or in the section whose fields they name."""
        named = (option.partition("=") for option in self.options)
        found = ((reduce(_field_of, name.split("."), given), equals, value) for name, equals, value in named)
        return any(own == value if equals else own not in OFF for own, equals, value in found)


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


# The seams: what a capability may add, in the order of the reading list. Where nothing else is said, a function or an
# object is asked for what stands behind the colon.
LISTED = {  # without names: asked in the order of the capabilities
    # A recipe and its plan.
    "recipe_folders": "lets a recipe file import what lies in its folder",
    "recipe_fields": "of a recipe: a class with these fields",
    "data_fields": "of its section `data`: the same",
    "optimizer_fields": "of its section `optimizer`: the same",
    "log_fields": "of its section `log`: the same",
    "rampups": "of the batches of a recipe: makes its `config.schedule.BatchSizes`",
    "recipe_notes": "on a valid recipe: a table of `util.rules`",
    "plan_rules": "what a recipe cannot be under a `plan`: a table of `util.rules`",
    "settings_rules": "what `Settings` cannot be: a table of `util.rules`",
    "plan_choices": "the recipe with a plan, for a recipe with `auto` and a number of processes",
    "compilers": "whether blocks are compiled, by what a recipe says, device, graphs and plan",
    "device_checks": "of a GPU: raises UserError where this torch cannot compute on it",
    "device_notes": "of `Settings` on a GPU: what a user should know, or None",
    # Models and operations.
    "few_words": "of random numbers on a CPU: an object with the functions of `ops.random.philox.few_numbers`",
    "activations": "finds a function of MLPs, like `ops.activations.activation`",
    "rotary_scalings": "frequencies, for a `Rotation` and its waves",
    "core_sizes": "measures the attention cores of a block that do not say their sizes",
    "sharings": "of the tokens of a row by samples: a `models.layers.Sharing` for `Batch.copies`",
    "foreign_models": "what to do with a checkpoint of a class that is not here",
    # How a rank's model is built and runs.
    "stage_cuts": "blocks of each pipeline stage, of a config and a number of stages",
    "build": "what is done to a stage: a `parallel.build.Entry`",
    "added_modules": "where a section freezes weights: adds the modules of a stage that are trained",
    "initial_values": "fills these",
    "batch_parts": "a rank's part of a batch, where ranks share samples, from the whole and the rank's place",
    "cp_groups": "makes the groups of ranks that share samples, for a mesh",
    "own_plans": "raises UserError where the plans that a recipe defines are none, or have names of others",
    "own_tables": "raises UserError for a plan's own table that no model can have",
    "tp_tables": "of a plan and a `parallel.build.Building`: the styles that take their place",
    "roles_in_pieces": "roles whose sums come in pieces, where `--reduce exact_tp` makes them: a tuple",
    "own_styles": "joins the styles of a plan's own table to the default ones",
    "head_degrees": "of each block, under a plan with a table: the ranks over which heads are cut",
    "table_tests": "tests an engine whose plan has a table, by its settings, before the first step",
    "sum_costs": "of sums of gradients, where memory is planned: a class that derives from `planning.sums.Costs`",
    "transports": "a way between ranks: a `parallel.collectives.Transport`",
    "late_votes": "of a mesh on GPUs: makes what `Mesh.vote` asks",
    "buckets": "of parameters: a class that derives from `parallel.gradients.Bucket`",
    "flat_sums": "of 16-bit numbers: a class that derives from `parallel.collectives.FlatSum`",
    "inference_stages": "makes those of a rank, like `parallel.inference.inference_stages`",
    "graphs": "replays pieces of a step: a class that derives from `parallel.engine.Graphs`",
    "timers": "of the parts of a step: a class that derives from `parallel.engine.Timers`",
    "step_states": "makes what a step keeps for the next one, or returns None",
    # A run.
    "beginnings": "of a run with other weights than new ones: a `train.start.Beginning`, or None",
    "bases": "of weights that checkpoints leave out: a `train.init_from.begin.Base`",
    "memory_checks": "before a rank allocates, of settings, rank and ranks of its node: raises UserError",
    "cpu_starts": "called before a run on a CPU allocates",
    "observers": "what happens between steps: a function of log and steps that makes an `Observer`",
    "reports": "of a run, on rank 0: a class that derives from `run.report.RunReport`",
    "stops": "ask a run to end: a class that derives from `run.stop_request.StopRequest`",
    "unfinished": "of what a start has left undone: a class that derives from `train.observer.Unfinished`",
    "former_starts": "keeps what a start was, when another one begins: see `run.folder.describe_run`",
    "sample_counts": "of a run that goes on: `train.sample_counts.counts.SAMPLE_COUNTS`",
    "newest_runs": "of a name, for `resume=auto`: `run.newest.run.NEWEST`",
    "older_recipes": "of what recipe.json says, which it changes to what is written today",
    "saved_recipes": "of a run that goes on: its values by name, checked, of all that recipe.json says",
    "kept_values": "of a run that goes on: says in which values its recipe file differs",
    "changed_values": "of a run that goes on: the values that change, in words",
    "kept_data": "of a run that goes on: refuses a path of data that are not here",
    "savers": "of checkpoints: a class that derives from `checkpoint.save.Saver`",
    "verifications": "of checkpoints: a `checkpoint.shard_file.Verification`",
    "peers": "how processes find and watch each other: a `util.peers.Peers`",
    # Files.
    "sources": "weights of other libraries: a `checkpoint.open.SourceFormat`",
    "addends": "of a `Source`, its path, another path and a mesh: adds what is there to the weights",
    "datasets": "data that are no plain text: a `data.open.DataFormat`",
    "tokenizers": "of other libraries: a `data.tokenizers.open.TokenizerFormat`",
    "masks": "of a `DataConfig` and an end of text: makes what takes the place of `models.batch.WindowMasks`",
    "data_checks": "of a `DataConfig`, a dataset, samples, their length and the seed: raises UserError",
    "batches": "of steps, on a device: a class that derives from `data.dataset.Batches`",
    "caches": "of the tokens of texts, one at most: a function like `data.cached.text.keep_tokens`",
    "locks": "of files: a class that derives from `util.storage.FileLock`",
    "places": "from a name that is no path, to the path of what it names; None: of others",
    "near_paths": "finds a path like one that does not exist",
    # Generation.
    "options": "of a prompt: a class that derives from `inference.base_options.BaseOptions`",
    "prompt_options": "of `dtgpt generate`: a dataclass of options, with a function `chosen`",
    "exact_bits": "of training's forward pass: an `inference.kernels.serve.ExactBits`",
    "rank_steps": "a class that derives from `inference.step.Step`, with `serves`",
    "rank_commands": "of rank 0 to all ranks: functions as in `inference.commands`",
    "engines": "what generation may be asked for beside draws: a class that derives from `inference.engine.Engine`",
    "schedulers": "of requests: a class that derives from `inference.scheduler.Scheduler`",
    "special_ids": "of a tokenizer, or None and the size of a vocabulary: ids by the fields of `SpecialIds`",
    "logit_rules": "before a token is chosen, of a `Variant`: a function like `inference.rules.edits.edit`",
    "text_streams": "of tokens that depend on others: an `inference.prompts.TextStream`",
    # The program and its machine.
    "program_starts": "before torch is imported, without arguments: why the program cannot go on, or None",
    "watches": "called as the program begins, before it knows its command",
    "launches": "the processes of a run: the class of a `Launch`, one at most",
    "option_help": "what `--help` says of options: `commands.option_help.text.describe`",
    "explanations": "of what a user gave: `Explanations`",
    "failures": "told the sentence with which the program ends",
    "executors": "makes an `Executor` of a number of threads",
    "environments": "of a device: what is said of the machine, by name",
    "versions": "of what is installed, by package",
    "memory_errors": "a context in which they are told, with a remedy",
}
NAMED = {  # by a name, under which the core or a user asks for one
    "public": "what `import dtgpt` gives",
    "sections": "of a recipe: the class of a field",
    "precisions": "of a recipe: a `config.sections.Precision`",
    "precision_help": "by such a name: what `--help` says of it",
    "schedules": "of learning rates: a class that derives from `config.schedule.Schedule`",
    "optimizers": "by its kind: the class of a config",
    "recomputes": "in backward, by a recipe's `recompute`: what does so",
    "sums": "of gradients, by a recipe's `reduce`: a class that derives from `parallel.gradients.Sums`",
    "alternatives": "of a plan: what can `parse` them, and `choose` one",
    "degrees": "by the field of a plan: checks it",
    "idle_degrees": "by the field of a plan: what inference ignores, in words",
    "role_styles": "by a role: makes its `ParallelStyle`",
    "architectures": "the class of a model's config",
    "kernels": "by an operation: a sequence of `ops.operation.Kernel`",
    "objectives": "by the option that turns it on: the class of what a run learns",
    "entries": "of a checkpoint: checks the entry of this name",
    "tokenizer_kinds": "which data may name: makes one, like `data.tokenizers.open.make_tokenizer`",
    "saved_tokenizers": "by a field of what `Tokenizer.save` wrote: makes the tokenizer, and tries whether it encodes",
    "encoders": "by the option that asks for it: makes tokens of messages, a `data.prepare.encode.MessageFormat`",
    "commands": "`dtgpt NAME`: a `CommandEntry`",
}


class Capability:
    """What a capability adds, by seam: of those LISTED a tuple of parts, and of those NAMED parts by name. Each part is
    'module:object', of those LISTED perhaps in a `When`, and is imported when the core first needs it."""

    def __init__(self, **parts: Any):
        if unknown := parts.keys() - LISTED.keys() - NAMED.keys():
            raise TypeError(f"there is no seam {', '.join(sorted(unknown))}")
        self.parts = dict.fromkeys(LISTED, ()) | {name: {} for name in NAMED} | parts


OFF = (None, False, 0, "", "off")


def _field_of(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


_left: list[str] = []  # modules of capabilities that nobody has asked for yet
_capabilities: list[Capability] = []


def use(modules: Iterable[str]) -> None:
    """Let the core have the capabilities that `modules` describe, and no others."""
    _left[:] = modules
    _capabilities.clear()
    _parts.cache_clear()


def capabilities() -> list[Capability]:
    """Return the capabilities in use, in the order in which they were named. Where a module that describes one imports
    what asks here: all others."""
    for name in tuple(_left):
        module = importlib.import_module(name)
        # One that is being imported describes nothing yet.
        if name in _left and (hasattr(module, "CAPABILITY") or not getattr(module.__spec__, "_initializing", False)):
            _capabilities.append(module.CAPABILITY)
            _left.remove(name)
    return _capabilities


def load(part: str) -> Any:
    """Return the object that 'module:object' names."""
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(module), name)


def added(seam: str) -> dict[str, Any]:
    """Return the parts that capabilities add at a seam, by name."""
    return {name: part for capability in capabilities() for name, part in capability.parts[seam].items()}


def first(seam: str, missing: str) -> Any:
    """Return the first object that capabilities add at a seam. Raise UserError with the sentence `missing` for none."""
    for found in listed(seam):
        return found
    raise UserError(missing)


def with_kinds(seam: str, base: type, given: Any = None) -> type:
    """Return the class `base` with those that capabilities derive from it, and add at a seam (`listed`): each calls the
    next by `super()`, and the last one calls `base`."""
    return type(base.__name__, (*listed(seam, given), base), {})


def ask(seam: str, question: Callable[[Any], Any]) -> Any:
    """Return the first answer that is something, of the objects that capabilities add at a seam, in their order; None
    where no answer is."""
    return next(filter(None, map(question, listed(seam))), None)


def listed(seam: str, given: Any = None) -> list[Any]:
    """Return the objects that capabilities add at a seam without names, imported: of those `When` some options are on,
    those that are on in `given`."""
    parts = _parts(seam, len(capabilities()))
    named = (part if isinstance(part, str) else part.part if part.is_on(given) else "" for part in parts)
    return [load(part) for part in named if part]


@cache  # a search for plans asks some seams thousands of times
def _parts(seam: str, count: int) -> tuple[str | When, ...]:  # of the first capabilities
    return tuple(part for capability in capabilities() for part in capability.parts[seam])
