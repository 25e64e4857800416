"""What a run learns: which batch a step has, what its loss is a mean of, and what is said of it.

The trainer takes an `Objective` and asks it for the batch of each step; all else of a step (passes, sums of gradients,
the update) is the same for every objective. Language modelling stands here. Other objectives are capabilities, most of
them language models with other batches: `objective_of` imports their modules only where the recipe has them on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import PART_NAMES, Batches, Dataset, HeldOutPart, bits_per_byte, perplexity
from dtgpt.models.batch import Batch, WindowMasks
from dtgpt.models.decoder import Decoder
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.parallel.engine import Timers, TrainingEngine
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.train.interval_loss import IntervalLoss
from dtgpt.util import seams
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import to_device

Interrupted = Callable[[], bool]  # whether somebody has asked to stop, the same on all ranks


def own_tokens(batch: Batch, place: RankCoordinates) -> Batch:
    """Return what a rank computes of a batch: all of it, unless ranks share samples."""
    for cut in seams.listed("batch_parts") if place.plan.cp > 1 else ():
        return cut(batch, place)
    return batch


def never() -> bool:
    """Return False: nobody has asked to stop."""
    return False


@dataclass(frozen=True, kw_only=True)
class Given:
    """What an objective is told of a recipe. `section`: the part of it that turns the objective on; None for language
    modelling."""

    section: Any
    data: DataConfig
    seed: int
    steps: int
    timeout: float  # seconds that a process waits for another


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an objective computes with: parts of a trainer, which it does not know."""

    settings: Settings
    mesh: Mesh
    stages: list[Decoder]
    engine: TrainingEngine
    timers: Timers
    ends: tuple[int, ...]  # ids at which generated texts end
    samples_of: Callable[[int], range]  # the numbers of a step's samples, over all replicas


class HeldOut(NamedTuple):
    """What is said of the samples for validation or test."""

    figures: dict[str, float]  # of the record, with "loss"
    shown: str  # in the console
    finite: dict[str, float]  # by what they are called: others than finite ones say that the run has diverged


class StepFailed(UserError):
    """A batch could not be made, which is known on every rank, and nothing of its step was done: the run saves, and
    ends. `__cause__`, on the rank that met it: an error of the recipe's own code."""


class Objective(ABC):
    """What a run learns from `dataset`. The order of the calls: `check`, before there are a model and ranks;
    `__init__`; `bind`, when the trainer's parts are there; `restore`, in a run that goes on; `prepare`; the steps."""

    @classmethod
    def check(cls, given: Given, dataset: Dataset) -> None:
        """Raise UserError where the data are not those of this objective."""
        if dataset.only_for is not None:
            raise UserError(f"{dataset.source} has {dataset.only_for}")

    def __init__(self, given: Given, dataset: Dataset):
        self.given, self.dataset = given, dataset

    @abstractmethod
    def bind(self, parts: Parts) -> None:
        """Take the parts of the trainer, and give the head another loss where the objective has one. Raise UserError
        where these parts cannot have the objective."""

    @abstractmethod
    def take(self, step: int) -> tuple[Batch, Tensor | None]:
        """Return this rank's part of the batch of `step` on the device, whose fields have the same shapes and types in
        each step; and whether nothing of the global batch counts, a bool scalar, None: something does. Steps are taken
        in their order. Raises StepFailed."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return this rank's part of the batch of any step, to be looked at: nothing is taken."""

    @abstractmethod
    def held_out(self, part: HeldOutPart, samples: int, interrupted: Interrupted = never) -> HeldOut | None:
        """Return what is said of at most so many samples of a part, the same on every rank; None where there is nothing
        to say, or when interrupted."""

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027, most keep nothing
        """Go on from the `state` of a checkpoint, or of a run of another library."""

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint keeps when `step` steps are done."""
        return {}

    def prepare(self, step: int, run: Path | None, interrupted: Interrupted = never) -> bool:
        """Make ready for the steps from `step` on, before anything is written. run: the folder of a run that goes on;
        None: of a new one. Returns False when interrupted."""
        return True

    def save(self, run: Path) -> None:  # noqa: B027
        """Write what the folder of a new run keeps. Rank 0 alone calls it."""

    def open_interval(self, mesh: Mesh) -> IntervalLoss:
        """Return what sums the losses between two records, after `bind`."""
        return IntervalLoss(mesh)

    def figures(self, interval: Any) -> dict[str, float]:
        """Return what a record says of the steps of an interval, which `open_interval` has made, and of its last
        step."""
        return {}

    def caution(self, figures: dict[str, float]) -> str | None:
        """Return a warning about the figures of a record; None where there is none."""
        return None

    def examples(self) -> dict[str, str]:
        """Return texts that the last step was about, by what they are called."""
        return {}


class LanguageModel(Objective):
    """Predict the next token of each sample. A kind of it reads more than windows (`read`), and adds it to the batch
    (`add`)."""

    def __init__(self, given: Given, dataset: Dataset):
        super().__init__(given, dataset)
        data, root = given.data, root_key(given.seed)
        self.data_key, self.dropout_key = fold(root, "data"), fold(root, "dropout")
        self.masks = WindowMasks()
        for make in seams.listed("masks", data):
            self.masks = make(data, dataset.tokenizer.end_of_text)

    def bind(self, parts: Parts) -> None:
        model, self.parts = parts.settings.model, parts
        self.num_sites = model.num_sites if model.dropout > 0 else 0  # of dropout, where any drops
        ahead = seams.listed("batches") if parts.mesh.device.type == "cuda" else []
        self.batches = [*ahead, Batches][0](self.read, parts.mesh.device)

    def take(self, step: int) -> tuple[Batch, Tensor | None]:
        with self.parts.timers.measure("data", host=True):
            read = self.batches.take(step)
        return self.make(*read)

    def batch(self, step: int) -> Batch:
        return self.make(*(value.to(self.parts.mesh.device) for value in self.read(step)))[0]

    def read(self, step: int) -> tuple[Tensor, ...]:
        """Return this replica's windows (`Dataset.windows`), sample ids `[B]`, the dropout key `[2]` of `step`, and
        whatever else `add` takes; on the CPU. A thread calls it in advance: it must not meet ranks."""
        samples, place = self.parts.samples_of(step), self.parts.mesh.place
        count = len(samples) // place.plan.dp
        sample_ids = samples.start + place.dp * count + torch.arange(count)
        windows = self.dataset.windows(sample_ids, self.parts.settings.seq_length, self.data_key)
        return windows, sample_ids, fold(self.dropout_key, step)

    def add(self, batch: Batch, windows: Tensor, sample_ids: Tensor, *more: Tensor) -> Batch:
        """Return the batch of whole samples with what this objective adds to it."""
        return batch

    def make(self, windows: Tensor, sample_ids: Tensor, step_key: Tensor, *more: Tensor) -> tuple[Batch, Tensor | None]:
        """Return the batch of what was read, on the device, and whether nothing of the global batch counts."""
        keys = dropout_keys(step_key, sample_ids, self.num_sites) if self.num_sites else None
        batch = self.add(self.dataset.to_batch(windows, self.masks, keys), windows, sample_ids, *more)
        batch = own_tokens(batch, self.parts.mesh.place)
        if batch.loss_weights is None:
            return batch, None
        # The mean loss is that over the weights of the whole global batch, of which each rank has a part.
        counted = self.counted(batch)
        scale = batch.loss_weights.numel() * self.parts.mesh.plan.data_ranks / counted.clamp(min=1)
        return batch._replace(loss_weights=batch.loss_weights * scale.float()), counted == 0

    def counted(self, batch: Batch) -> Tensor:
        """Return how many weights of the global batch are not 0, fp64 on the device."""
        assert batch.loss_weights is not None
        mesh, plan = self.parts.mesh, self.parts.mesh.plan
        return mesh.sum(batch.loss_weights.count_nonzero())[0] / (plan.tp * plan.pp)

    def held_out(self, part: HeldOutPart, samples: int, interrupted: Interrupted = never) -> HeldOut | None:
        settings = self.parts.settings
        batches = list(self.dataset.held_out(part, settings.seq_length, settings.micro_batch_size, samples))
        token_bytes = torch.from_numpy(self.dataset.tokenizer.token_bytes())

        def to_batch(windows: Tensor) -> Batch:
            return self.dataset.to_batch(windows, self.masks)

        found = held_out_loss(self.parts.engine, self.parts.mesh, batches, to_batch, token_bytes, interrupted, part)
        if found is None:
            return None
        loss, bits = found
        figures = {"loss": loss, "perplexity": perplexity(loss)}
        shown, finite = f"loss {loss:.4f}  ppl {perplexity(loss):.4g}", {f"{PART_NAMES[part]} loss": loss}
        if bits is not None:
            figures["bits_per_byte"] = finite["bits/byte"] = bits
            shown += f"  bits/byte {bits:.3f}"
        return HeldOut(figures, shown, finite)


def turns(sizes: Sequence[int], mesh: Mesh) -> Iterator[tuple[int, bool]]:
    """Yield which of the batches of these sizes this replica takes, turn by turn, and whether it counts there. Ranks
    may meet within a batch: in a turn all have one of the same size, and who has none left repeats another,
    uncounted."""
    dp, place = mesh.plan.dp, mesh.place.dp
    for _, alike in groupby(range(len(sizes)), sizes.__getitem__):
        numbers = list(alike)
        for turn in (numbers[first : first + dp] for first in range(0, len(numbers), dp)):
            yield turn[min(place, len(turn) - 1)], place < len(turn)


@torch.no_grad()
def held_out_loss(
    engine: TrainingEngine,
    mesh: Mesh,
    batches: list[Tensor],
    to_batch: Callable[[Tensor], Batch],
    token_bytes: Tensor,
    interrupted: Interrupted,
    part: HeldOutPart = "valid",
) -> tuple[float, float | None] | None:
    """Return (mean loss in nats per token, bits per byte where bytes are known) over batches of windows of a part of
    the data, the same on every rank; None where there are none, where no token of them counts, which is said, or when
    `interrupted` became true in between. `token_bytes [V]`: the bytes that each token spells."""
    totals = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    for index, counts_here in turns([*map(len, batches)], mesh):
        if interrupted():
            return None
        whole = to_batch(to_device(batches[index], mesh.device))
        batch = own_tokens(whole, mesh.place)
        loss = engine.evaluate(batch)
        if loss is not None and counts_here:
            assert batch.targets is not None
            targets = batch.targets.cpu()
            weights = torch.ones(targets.shape) if batch.loss_weights is None else batch.loss_weights.cpu()
            counts = [loss.item() * targets.numel(), weights.sum(), (token_bytes[targets] * weights).sum()]
            totals += torch.tensor(counts, dtype=torch.float64)
    nats, tokens, text_bytes = (mesh.sum(*totals) / mesh.plan.tp).tolist()
    if batches and not tokens:
        none = f"no token of {counted(len(batches), 'batch', 'batches')} counts"
        say(f"there is no {PART_NAMES[part]} loss: {none}", warning=True)
    return (nats / tokens, bits_per_byte(nats, text_bytes)) if tokens else None


def objective_of(recipe: Recipe) -> tuple[type[Objective], Given]:
    """Return the class of the objective that the recipe turns on, language modelling where it turns on none, and what
    it is told of the recipe. Raises UserError where the recipe turns on two."""
    on = {name: part for name, part in seams.added("objectives").items() if attrgetter(name)(recipe)}
    if len(on) > 1:
        raise UserError(f"a run has one objective, but {' and '.join(on)} are given; leave out all but one")
    kind, section = LanguageModel, None
    for name, part in on.items():
        kind, section = seams.load(part), attrgetter(name.rpartition(".")[0])(recipe)
    steps, timeout = recipe.num_steps, recipe.timeout
    return kind, Given(section=section, data=recipe.data, seed=recipe.seed, steps=steps, timeout=timeout)
