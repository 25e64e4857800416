"""Sections of a recipe: data, optimizer, log, checkpoints.

A field is the only place where an option is written down: its annotation has the type, the help text and the bounds,
from which the command line, `--help`, the checks and recipe.json all follow. Defaults are those with which a run of
GPT-2 works; a recipe names what it changes.

`Section` and `Precision` are what capabilities add to recipes. Both answer all that the core asks, so that a capability
writes only what it changes, and the core has no branch for any of them. To the core's own sections capabilities add
fields, which they alone read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch

from dtgpt.config.schedule import ScheduleName
from dtgpt.models.config import ModelConfig
from dtgpt.ops.optim.adamw import AdamW, Slot
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.util import seams
from dtgpt.util.field_types import PATH, Bounds, Pattern
from dtgpt.util.rules import Given, Rule, Rules, check_rules

POSITIVE = Bounds(above=1e-38)  # below this, fp32 rounds to zero or loses digits
DEFAULT_SPLIT = "969,30,1"  # of prepared data, as in Megatron-LM


class Section:
    """What the core knows of a section that a capability adds to recipes: a frozen dataclass of this base, whose fields
    have defaults with which it is off. The core asks the sections that have other values, in their order. What raises,
    raises UserError, one sentence.

    fixed: whether a run goes on with the values that it began with.
    aliases: other names of options, with dots, and the fields that they mean.
    recipe_rules, plan_rules, new_weights_rules: tables of what the values cannot be: with those of a recipe, by the
    recipe's names; with a `plan`; where a run begins with random weights. The methods check them.
    """

    fixed: ClassVar[bool] = False
    aliases: ClassVar[Mapping[str, str]] = {}
    recipe_rules: ClassVar[Rules] = ()
    plan_rules: ClassVar[Rules] = ()
    new_weights_rules: ClassVar[Rules] = ()

    @property
    def freezes_weights(self) -> bool:
        """Whether the run trains modules that a capability adds, and leaves the model's own weights as they are."""
        return False

    def check_recipe(self, recipe: Any) -> None:
        """Check the values with each other, and with those of a `dtgpt.config.recipe.Recipe`."""
        check_rules(self.recipe_rules, recipe)

    def check_new_weights(self) -> None:
        """Check whether a run can begin with random weights, or with another library's run."""
        check_rules(self.new_weights_rules, self)

    def changed_beginning(self, begin: Any, resume: Any) -> Any:
        """Return a `dtgpt.train.start.Beginning` of a run with what the section changes of it. resume: the run or the
        checkpoint with which the run goes on; None for a new one."""
        return begin

    def check_plan(self, plan: Any) -> None:
        """Check whether a run can have a `dtgpt.config.plan.ResolvedPlan`."""
        check_rules(self.plan_rules, self, plan=plan)

    def check_settings(self, settings: Any) -> None:
        """Check whether a run can have `dtgpt.config.execution.Settings`."""

    def notes_on(self, plan: Any) -> list[str]:
        """Return what a user should know about a valid recipe under a `dtgpt.config.plan.ResolvedPlan`."""
        return []


Added = TypeVar("Added", bound=Section)


def section_of(sections: Iterable[Section], kind: type[Added]) -> Added:
    """Return the section of this class, with its defaults where there is none."""
    return next((each for each in sections if isinstance(each, kind)), None) or kind()


class Precision:
    """A precision that a capability adds, beside fp32, bf16 and fp16.

    dtype: of activations, and of the weights that products read.
    """

    dtype: torch.dtype

    def check_device(self, device: torch.device) -> None:
        """Raise UserError where a device does not have what the precision needs."""

    def notes_on(self, model: ModelConfig, plan: Any, micro_batch_size: int, length: int, device: str) -> list[str]:
        """Return what a user should know of samples of a `length` under a plan on a kind of device."""
        return []


def precision_of(name: str) -> Precision | None:
    """Return the precision that a capability adds under this name, None for those of the core."""
    part = seams.added("precisions").get(name)
    return None if part is None else seams.load(part)


def with_sections(before: str) -> Callable[[type], type]:
    """Add the sections of capabilities to the class of a recipe, which then becomes a dataclass. before: the field
    before which they stand, in the order of `--help` and of recipe.json."""

    def add(recipe: type) -> type:
        sections = {name: seams.load(part) for name, part in seams.added("sections").items()}
        for name, kind in sections.items():
            setattr(recipe, name, field(default_factory=kind))
            recipe.aliases |= {alias: f"{name}.{meant}" for alias, meant in kind.aliases.items()}  # type: ignore
        own = list(recipe.__annotations__.items())
        place = [name for name, _ in own].index(before)
        recipe.__annotations__ = dict([*own[:place], *sections.items(), *own[place:]])
        return recipe

    return add


class CoreSection:
    """A section of the core. seam: where capabilities list classes whose fields come behind those that are written
    here; they read these as fields of such a class."""

    def __init_subclass__(cls, seam: str | None = None):  # before the class becomes a dataclass
        for more in () if seam is None else seams.listed(seam):
            cls.__annotations__ |= more.__annotations__
            for name in more.__annotations__:
                setattr(cls, name, getattr(more, name))


@dataclass(frozen=True, kw_only=True)
class DataConfig(CoreSection, seam="data_fields"):
    """The data of a run, their tokenizer and their order."""

    path: Annotated[
        str | None,
        "text file (.txt or .jsonl), prefix of a prepared .bin and .idx, or weights and prefixes as in '0.3 A 0.7 B'; "
        "none: a text included in Python",
        PATH,
    ] = None
    valid_path: Annotated[str | None, "validation dataset; split is then ignored, each path used entirely", PATH] = None
    test_path: Annotated[str | None, "test dataset, evaluated at the end; split is then ignored", PATH] = None
    split: Annotated[str, "relative sizes of the training, validation and test parts of prepared data"] = DEFAULT_SPLIT
    train_samples: Annotated[int | None, "samples whose order is computed; none: those of the run", Bounds(1)] = None
    json_key: Annotated[str, "key of the text in each line of a .jsonl file"] = "text"
    tokenizer: Annotated[
        Literal["auto", "gpt2", "bpe", "bytes", "char", "ids"],
        "auto: the tokenizer saved with prepared data; for a text file, that of init_from, else gpt2 if the model has "
        "its 50257 tokens, else a bpe trained on the text; char: characters of the text, or of nanoGPT's meta.pkl; "
        "ids: no tokenizer, and so no bits/byte and no generated texts",
    ] = "auto"
    tokenizer_file: Annotated[str | None, "tokenizer of the data, as for dtgpt prepare --tokenizer", PATH] = None
    vocab_file: Annotated[str | None, "vocab.json of gpt2, with merge_file; none: tiktoken's own", PATH] = None
    merge_file: Annotated[str | None, "merges.txt of gpt2, with vocab_file", PATH] = None
    bpe_vocab_size: Annotated[int, "number of tokens of a trained BPE, including <|endoftext|>"] = 1024
    order: Annotated[
        Literal["shuffled", "sequential"],
        "order of training samples; sequential: consecutive tokens of the shards, file after file, each cut after its "
        "last whole batch",
    ] = "shuffled"
    overfit: Annotated[bool, "train on the samples of the first step in every step, to see that the loss falls"] = False
    held_out: Annotated[float, "fraction of the text kept for validation", Bounds(0, below=1)] = 0.05


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CoreSection, seam="optimizer_fields"):
    """AdamW (Loshchilov and Hutter 2019) with fp32 master weights; no decay on biases and LayerNorms. The config of
    another optimizer derives from it, and overrides `kind` and the methods.

    takes: by the kind of another optimizer, whose state this one can go on with, the name of each state there by the
    name here; None: that optimizer has no such state, and it begins at zero.
    """

    takes: ClassVar[Mapping[str, Mapping[str, str | None]]] = {}
    rules: ClassVar[Rules] = (
        Rule(
            "optimizer.decay_steps={decay_steps} and optimizer.decay_samples={decay_samples} both end the schedule; "
            "set one of them to none",
            Given("decay_steps"),
            Given("decay_samples"),
        ),
    )

    kind: Annotated[str, "optimizer", Pattern("adamw", "is another optimizer; use adamw")] = "adamw"
    lr: Annotated[float, "peak learning rate", POSITIVE]
    min_lr: Annotated[float, "learning rate at the end of the schedule", Bounds(0)] = 0.0
    schedule: Annotated[ScheduleName, "learning rate after the warmup"] = "cosine"
    warmup: Annotated[float, "number of warmup steps; below 1: a fraction of the schedule", Bounds(0)] = 0.01
    decay_steps: Annotated[int | None, "step at which the schedule reaches min_lr; none: the last", Bounds(1)] = None
    decay_samples: Annotated[
        int | None,
        "sample at which the schedule reaches min_lr; the schedule then counts samples, not steps",
        Bounds(1),
    ] = None
    warmup_samples: Annotated[int | None, "number of warmup samples, for a schedule that counts them", Bounds(0)] = None
    weight_decay: Annotated[float, "decoupled weight decay of matrices", Bounds(0)] = 0.1
    beta1: Annotated[float, "decay rate of the first moment", Bounds(0, below=1)] = 0.9
    beta2: Annotated[float, "decay rate of the second moment", Bounds(0, below=1)] = 0.95
    eps: Annotated[float, "added to the square root of the second moment", POSITIVE] = 1e-8
    clip: Annotated[float, "largest global norm of the gradient; 0: no clipping", Bounds(0)] = 1.0

    def make(self, shards: Any) -> Optimizer:
        """Return the optimizer of this rank's `dtgpt.parallel.shards.Shards`, with an empty state."""
        slots = [Slot(shard.local, shard.low_precision, decay=shard.dimensions > 1) for shard in shards]
        return AdamW(slots, self.beta1, self.beta2, self.eps, self.weight_decay)

    def notes(self, model: ModelConfig) -> list[str]:
        """Return what a user should know about training this model with it."""
        return []


@dataclass(frozen=True, kw_only=True)
class LogConfig(CoreSection, seam="log_fields"):
    """What a run reports, and when."""

    interval: Annotated[int, "number of steps between progress lines", Bounds(1)] = 10
    eval_interval: Annotated[int, "number of steps between validation losses; 0: at the end only", Bounds(0)] = 250
    eval_samples: Annotated[int, "largest number of validation samples per evaluation", Bounds(1)] = 512
    # Of texts that a capability generates: without it they say nothing, and recipes that name them are as they were.
    sample_interval: Annotated[int, "number of steps between generated texts; 0: at the end only", Bounds(0)] = 0
    sample_tokens: Annotated[int, "number of tokens to generate; 0: no generated texts", Bounds(0)] = 200
    prompt: Annotated[
        str, "beginning of generated texts; empty: the model begins a document, or answers validation chats"
    ] = ""
    temperature: Annotated[float, "sampling temperature; 0: always the likeliest token", Bounds(0, 100)] = 0.8
    top_k: Annotated[int, "number of likeliest tokens to choose from; 0: all", Bounds(0, 2**31 - 1)] = 50


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves checkpoints, and which ones it keeps."""

    interval: Annotated[
        int, "number of steps between checkpoints; 0: at the end only, unless minutes is given", Bounds(0)
    ] = 1000
    minutes: Annotated[
        float | None, "minutes between checkpoints, beside interval; none: after interval steps only", Bounds(above=0)
    ] = None
    keep_last: Annotated[int, "number of newest checkpoints to keep; 0: all", Bounds(0)] = 2
    keep_every: Annotated[int, "keep every checkpoint whose step is a multiple of this; 0: none", Bounds(0)] = 0
    background: Annotated[bool, "write from a copy in host memory while training continues; off: training waits"] = True
