"""What a run takes of the model with which it begins: dimensions, tokenizer and weights, those too that it freezes and
leaves out of its checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from dtgpt.checkpoint.load import FREE, check_same_architecture, check_same_model, load_weights
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.open import check_size, formats, open_source, tokenizer_beside, tokenizer_place
from dtgpt.config.execution import Settings
from dtgpt.config.overrides import replace_values
from dtgpt.config.recipe import Recipe
from dtgpt.config.schedule import BatchSizes
from dtgpt.config.sections import DataConfig, Section
from dtgpt.data.open import format_of
from dtgpt.data.text import EMBEDDED
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.positions import learns_positions
from dtgpt.models.source import Source
from dtgpt.optim.step_state import StepState
from dtgpt.train.init_from import DataFields
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.start import Beginning
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import located

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer

OPTIONS = {"data.tokenizer": "auto", "data.tokenizer_file": None, "data.vocab_file": None}  # that may name a tokenizer


def begin(init_from: str | None, resume: str | Path | None, vocab_size: int) -> Beginning:
    """Return what a run begins with. Arguments as of a recipe."""
    return OtherModel(located(init_from)) if init_from else OwnRun()


class OwnRun(Beginning):
    """A run of dtgpt that goes on. change: returns the weights of another model, which has other sizes in this run, for
    a trainer."""

    change: Callable[["Trainer", Source], Source] = staticmethod(lambda trainer, source: source)

    def beside(self, checkpoint: Checkpoint, freezes: bool) -> Beginning:
        places = (base.place(checkpoint, self.path) for base in bases() if freezes)
        return Beside(checkpoint, next(places, None))


class OtherModel(OwnRun):
    """A new run with the weights of another run of dtgpt, or of a model of another library, at `path`."""

    path: Path

    def __init__(self, path: Path):
        self.path = path

    def settle(self, asked: Recipe, given: Collection[str]) -> Recipe:
        # A recipe file does not decide for a tokenizer that another model than this one was trained with.
        if not set(named_in(asked.data)).isdisjoint(given):
            asked = replace_values(asked, {"data.other_tokenizer": True})
        return self.with_dimensions(asked, given)

    def with_dimensions(self, asked: Recipe, given: Collection[str]) -> Recipe:
        """Return the recipe with the dimensions of the model, unless an option asks for others."""
        return replace_values(asked, model_values(self.path, asked.model, given, asked.sample_length))

    def with_tokenizer(self, data: DataConfig, model: ModelConfig) -> DataConfig:
        """Return the data with the tokenizer of the model, where nothing names theirs. Raises UserError where a text
        would need it and there is none, or it has more tokens than `model`."""
        if not self.path.exists() or named_in(data):
            return data
        prepared = format_of(data.path)
        if prepared and prepared.has_tokenizer(data):
            return data
        place, own = tokenizer_place(self.path), tokenizer_beside(self.path)
        if place is not None and own is not None:
            if own.spells or not prepared:
                check_size(own, model)
                return replace(data, tokenizer_file=str(place))
        elif not prepared:
            raise UserError(
                f"{self.path} has no tokenizer by which {_name_data(data)} becomes tokens; copy its tokenizer's files "
                "there, or name the one that it was trained with: --data.tokenizer_file FILE, or --data.tokenizer gpt2"
            )
        return data

    def check(self, sections: Collection[Section], model: ModelConfig, steps: int) -> None:
        """Nothing: these weights are not new."""

    def model_of_ends(self, data: DataConfig, tokenizer: Tokenizer) -> Path | None:
        return model_with(tokenizer, self.path, data)

    def give_weights(self, trainer: "Trainer", sizes: Callable[[int, int], BatchSizes]) -> None:
        load_initial_weights(self.path, trainer, self.change)

    def save(self, own: type[ModelConfig], tokenizer: Tokenizer, run: Path) -> None:
        config = open_config(self.path, own)
        for form in formats():
            form.keep(self.path, config, tokenizer, run)


class Beside(OwnRun):
    """The weights at `path` that a run of dtgpt freezes, None: it freezes none, beside the checkpoint with which it
    goes on."""

    def __init__(self, checkpoint: Checkpoint, path: Path | None):
        self.checkpoint, self.path = checkpoint, path

    def model_of_ends(self, data: DataConfig, tokenizer: Tokenizer) -> Path | None:
        return None if self.path is None else model_with(tokenizer, self.path, data)

    def give_weights(self, trainer: "Trainer", sizes: Callable[[int, int], BatchSizes]) -> None:
        if self.path is not None:
            load_initial_weights(self.path, trainer, self.change)
        entries = {state.name: state.entry for state in trainer.states if isinstance(state, Frozen)}
        for base in bases():
            if base.entry in self.checkpoint.state or base.entry in entries:
                base.check(self.checkpoint, entries.get(base.entry))


class Base(ABC):
    """The weights that a run freezes, which its checkpoints leave out: these say in an entry which they were, and how
    what is trained belongs to them. A capability that freezes weights has one."""

    entry: str  # its name

    @abstractmethod
    def place(self, checkpoint: Checkpoint, init_from: Path | None) -> Path | None:
        """Return where the weights are with which a run goes on, at `init_from` if they have moved. Raise UserError
        where they are gone, or the checkpoint leaves none out."""

    def held(self, settings: Settings, source: Source, device: torch.device) -> Source:
        """Return the weights of `source` in the form in which a run has them on this device."""
        return source

    @abstractmethod
    def describe(self, settings: Settings, path: Path, source: Source) -> dict[str, Any]:
        """Return the entry of a run that has begun with the weights of `source` at `path`."""

    @abstractmethod
    def check(self, checkpoint: Checkpoint, entry: dict[str, Any] | None) -> None:
        """Raise UserError where a run with this entry cannot go on with a checkpoint. None: the run freezes nothing."""


def bases() -> list[Base]:
    return seams.listed("bases")


class Frozen(StepState):
    """What the checkpoints of a run say of the weights that they leave out."""

    def __init__(self, name: str, entry: dict[str, Any]):
        self.name, self.entry = name, entry

    def state(self) -> dict[str, Any]:
        return self.entry

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Nothing: `Base.check` has compared both."""


def load_initial_weights(path: Path, trainer: "Trainer", change: Callable[["Trainer", Source], Source]) -> None:
    """Fill the shards of a new run with the weights at `path`, of another run or of another library, as `change`
    returns them. Raises UserError where it holds another model."""
    config = trainer.settings.model
    own_source = open_source(path, trainer.mesh, own=type(config))
    source = change(trainer, own_source)
    held = source.config
    if config.seq_length < held.seq_length and learns_positions(held):
        say(f"{path} has {held.seq_length} positions, of which this run takes the first {config.seq_length}")
        held = replace(held, seq_length=config.seq_length)
    elif not learns_positions(held):
        if config.seq_length > held.seq_length:
            say(f"{path} has {held.seq_length} positions; those up to {config.seq_length} are new to it", warning=True)
        held = replace(held, seq_length=config.seq_length)
    if type(held) is type(config):  # else the check says so
        held = _continued(path, held, config)
    check_same_model(path, held, config)
    for note in source.notes:
        say(note, warning=True)
    frozen = trainer.shards.frozen
    own = bases() if frozen is not None else []
    held_form = reduce(lambda found, base: base.held(trainer.settings, found, trainer.mesh.device), own, source)
    load_weights(held_form, frozen or trainer.shards)
    for base in own:
        describe = partial(base.describe, trainer.settings, path, own_source)
        trainer.states.append(Frozen(base.entry, trainer.mesh.on_rank_0(describe)))


def _continued(path: Path, held: ModelConfig, config: ModelConfig) -> ModelConfig:
    """Return the model at `path` with those values of the run's that are asked for in spite of its own, and say so."""
    changed = [name for name in sorted(config.continued) if getattr(held, name) != getattr(config, name)]
    if changed:
        values = ", ".join(f"model.{name} {getattr(held, name)} -> {getattr(config, name)}" for name in changed)
        say(f"the weights of {path} go on with other positions: {values}")
    return replace(held, **{name: getattr(config, name) for name in changed})


def model_values(
    path: Path, asked: ModelConfig, given: Collection[str], sample_length: int | None = None
) -> dict[str, Any]:
    """Return the dimensions of the model at `path` that `asked` does not have, by the names of recipe fields. Raises
    UserError where an option `given` contradicts them, or the architecture is another one. A shorter context is not a
    contradiction, nor is a scaling of rotary positions; where positions are not learned, their number is the recipe's,
    but for one that neither an option nor samples (`sample_length`, None: as many) ask for in spite of the model's."""
    config, samples = open_config(path, type(asked)), sample_length or asked.seq_length
    fits = "model.seq_length" not in given and samples <= config.seq_length < asked.seq_length
    return dimensions(path, config, asked, given, takes_length=fits)


def dimensions(
    path: Path,
    config: ModelConfig,
    asked: ModelConfig,
    given: Collection[str],
    exact: bool = False,
    takes_length: bool = False,
) -> dict[str, Any]:
    """Return the dimensions of a model of the shape `config`, which is at `path`, that `asked` does not have, by the
    names of recipe fields. exact: where no length of samples is given, it is that of the model, and a shorter one is a
    contradiction where positions are learned. takes_length: the number of positions is that of the model although they
    are not learned."""
    check_same_architecture(path, config, asked)
    takes_length = takes_length or learns_positions(config) or (exact and "model.seq_length" not in given)
    own = FREE if takes_length else FREE | {"seq_length"}
    if not exact:
        own = own | {n for n in config.continued if f"model.{n}" in given}
    held = {f"model.{n}": v for n, v in vars(config).items() if n not in own}
    wanted = {name: getattr(asked, name.removeprefix("model.")) for name in held}
    other = [n for n in held if n in given and wanted[n] != held[n]]
    wrong = [n for n in other if exact or n != "model.seq_length" or wanted[n] > held[n]]
    if wrong:
        told = " and ".join(f"--{name} {wanted[name]}, where the model has {held[name]}" for name in wrong)
        raise UserError(f"{path} cannot be begun with {told}; leave {' and '.join(f'--{n}' for n in wrong)} out")
    taken = {n: v for n, v in held.items() if n not in given and v != wanted[n]}
    if taken:
        changes = [f"  {name}: {wanted[name]} -> {value}" for name, value in taken.items()]
        say("\n".join([f"the model has the dimensions of {path} (recipe -> model):", *changes]))
    return taken


def named_in(data: DataConfig) -> list[str]:
    """Return the options that name a tokenizer in these data."""
    return [name for name, default in OPTIONS.items() if getattr(data, name.removeprefix("data.")) != default]


def model_with(ours: Tokenizer, path: Path, data: DataConfig) -> Path | None:
    """Return `path` if nothing is known of the model there by which it was trained with another tokenizer than `ours`,
    that of the data. Raise UserError where it was; warn where that was asked for, and return None."""
    own = tokenizer_beside(path)
    if own is None or not ours.spells or own.is_same(ours):
        return path
    told = (
        f"{path} was trained with another tokenizer ({_describe(own)}) than {_name_data(data)} has ({_describe(ours)})"
    )
    if cast(DataFields, data).other_tokenizer:
        say(f"{told}: its embeddings mean other tokens", warning=True)
        return None
    options = " ".join(f"--{name} {OPTIONS[name] or 'none'}" for name in named_in(data))
    take = f"give {options} to take that one, " if options and format_of(data.path) is None else ""
    raise UserError(
        f"{told}; {take}prepare a text with it (dtgpt prepare TEXT --tokenizer {tokenizer_place(path)} "
        "--output-prefix PREFIX), or name the tokenizer of the data with --data.tokenizer or --data.tokenizer_file to "
        "train on other tokens"
    )


def _name_data(data: DataConfig) -> str:
    return f"data.path={data.path}" if data.path else EMBEDDED


def _describe(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.name}, {tokenizer.vocab_size} tokens"
