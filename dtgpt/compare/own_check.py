"""Whether the run that others are held against can be held against anything: one process must compute the same bits
from the same state, and be as near to float64 as its precision allows.

A model that draws random numbers of its own fails the first, and would make every difference look like rounding.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.compare.float64 import BIT, trace_in_float64
from dtgpt.compare.pairing import distance, norm
from dtgpt.compare.shared_state import WEIGHT, held
from dtgpt.compare.trace import FP8_EPS, Key, Recorder, Trace, file_of, uncompiled
from dtgpt.models.decoder import Decoder
from dtgpt.models.shared.attention_backend import attention_backend
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.shards import Shard
from dtgpt.train.trainer import Trainer

TIMES = 8.0  # what weights that are moved by their last bit do to a tensor explains as much of its error
SMOOTH = 1e-4  # relative change of a tensor by weights moved by `BIT`, above which it is no change but chance
KINDS = ("activation", "gradient", "parameter")
LEAST = 1e-3  # of the largest tensor of its kind: a smaller tensor is held against that, since it may be rounding alone


class OwnFault(NamedTuple):
    """A tensor in which the reference differs from itself, or from float64."""

    kind: str  # "activation", "gradient", "parameter" (its gradient), "weight", or the name of a state
    name: str
    micro_batch: int | None
    difference: float  # relative
    limit: float  # of the difference


class Snapshot:
    """The weights and the optimizer's state of a trainer before a step, on the CPU."""

    def __init__(self, trainer: Trainer):
        self.tensors = {(kind, shard.index): value.to("cpu", copy=True) for kind, shard, value in held(trainer)}
        self.numbers = trainer.optimizer.state()

    def moved(self, shard: Shard) -> Tensor:
        """Return by how much a weight has moved since."""
        return shard.local.cpu() - self.tensors[WEIGHT, shard.index]

    @torch.no_grad()
    def restore(self, trainer: Trainer) -> None:
        for kind, shard, value in held(trainer):
            value.copy_(self.tensors[kind, shard.index])
        trainer.optimizer.restore(self.numbers)
        trainer.shards.publish()


class Repeat(Recorder):
    """Finds the first tensor of a step that has other bits than in `first`; within `limit`, which is relative, others
    are accepted."""

    def __init__(self, first: Trace, limit: float):
        super().__init__()
        self.trace, self.limit = first, limit
        self.found: OwnFault | None = None

    def keep(self, kind: str, name: str, value: Tensor, micro_batch: int) -> None:
        key = Key(micro_batch, kind, name)
        if key in self.tensors:
            return
        super().keep(kind, name, value, micro_batch)
        ours, self.tensors[key] = self.tensors[key], torch.empty(0)
        if self.found is None:
            theirs = self.trace[key] if key in self.trace.keys else torch.empty(0)
            apart = 0.0 if same_bits(ours, theirs) else relative(ours, theirs)
            if not apart <= self.limit:
                self.found = OwnFault(kind, name, micro_batch, apart, self.limit)


def repeat_step(trainer: Trainer, begin: Snapshot, file: Path) -> OwnFault | None:
    """Take the first step of a traced run of one process again, from the state before it. Return the first tensor in
    which the two differ."""
    end, settings = Snapshot(trainer), trainer.settings
    # The kernels of sdpa on GPUs add up gradients in any order.
    rounds = attention_backend(settings) == "sdpa" and trainer.mesh.device.type == "cuda"
    begin.restore(trainer)
    trainer.step -= 1
    repeat = Repeat(Trace(file_of(file, "0")), math.sqrt(eps_of(trainer)) if rounds else 0.0)
    with uncompiled(trainer), repeat.attached(trainer.stages):
        loss = trainer.gradients()
    trainer.update(loss)
    trainer.graphs.restart()  # whose warm-up is two steps of a run
    if repeat.found is not None or rounds:
        return repeat.found
    for kind, shard, value in held(trainer):
        theirs = end.tensors[kind, shard.index]
        if not same_bits(ours := value.cpu(), theirs):
            return OwnFault(kind, shard.name, None, relative(ours, theirs), 0.0)
    return None


def far_from_float64(
    trainer: Trainer, file: Path, kept: Mapping[str, Tensor], prepare: Callable[[Decoder], None] = lambda model: None
) -> OwnFault | None:
    """Return the first tensor of a traced step of one process that is further from float64 than its precision explains:
    more than half of its digits are wrong, and a change of the weights by their last bit does not do as much. kept:
    tensors of a record, with the first gradients. The trainer has its initial weights. prepare: as of
    `trace_in_float64`."""
    own, exact = Trace(file_of(file, "0")), Trace(file_of(file, "float64"))
    limit = math.sqrt(eps_of(trainer))
    measured = [(key, distance(value, right), norm(right)) for key, value, right in _beside_float64(own, exact, kept)]
    least = {kind: LEAST * max((size for key, _, size in measured if key.kind == kind), default=0.0) for kind in KINDS}
    sizes = [max(size, least[key.kind], 1e-300) for key, _, size in measured]
    far = [(key, error / size, size) for (key, error, _), size in zip(measured, sizes, strict=True)]
    if all(error <= limit for _, error, _ in far):
        return None
    trace_in_float64(trainer, file, moved=True, prepare=prepare)
    moved = Trace(file_of(file, "moved"))
    for key, error, size in far:
        if not error <= limit:
            change = distance(moved[key], exact[key]) / size
            explained = max(limit, TIMES * eps_of(trainer) / BIT * change if change <= SMOOTH else 0.0)
            if not error <= explained:
                return OwnFault(key.kind, key.name, key.micro_batch, error, explained)
    return None


def _beside_float64(own: Trace, exact: Trace, kept: Mapping[str, Tensor]) -> Iterator[tuple[Key, Tensor, Tensor]]:
    """Yield (key, value, value in float64) of what both have, in the order of the computation."""
    for key in own.keys:
        if key in exact.keys and not (key.kind == "gradient" and _is_partial(own, exact, key)):
            value, right = own[key], exact[key]
            if value.is_floating_point():
                rows = len(right) if right.dim() > 1 and len(right) < len(value) else None
                yield key, value if rows is None else value[:rows], right
    for key in exact.keys:
        if key.kind == "parameter":
            yield key, kept[f"first gradient/{key.name}"], exact[key]


def _is_partial(own: Trace, exact: Trace, key: Key) -> bool:
    """Return whether a gradient is of less in one of the two than in the other: of what autograd does not show, or of
    the first sample alone where it is the sum over samples, as that of positions is."""
    if key.name in own.fused and key.name not in exact.fused:
        return True
    return own.samples != exact.samples and own.rows_of_a_sample(key) != exact.rows_of_a_sample(key)


def eps_of(trainer: Trainer) -> float:
    """Return the relative distance of neighbours in the type of a run's products."""
    return FP8_EPS if trainer.settings.products == FP8 else torch.finfo(trainer.settings.dtype).eps


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN is the same as itself."""
    return a.shape == b.shape and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def relative(a: Tensor, b: Tensor) -> float:
    return distance(a, b) / max(norm(b), 1e-300) if a.shape == b.shape else math.inf
