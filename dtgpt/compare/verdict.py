"""How far a plan is from one process, and whether rounding alone explains it.

The first gradient and the first loss are those of the same weights and samples: what rounding does to them is known by
precision and plan, and their limits are sharp. From then on two right runs part, sooner or later, by as much as the
model multiplies rounding. What comes later is therefore held against one process that only rounds otherwise: one whose
initial weights were moved by their last bit. Learning rates and loss scales are equal, bit for bit.

A gradient or weight is compared tensor by tensor, ||a - b|| / ||b||, and the worst tensor counts. A weight's difference
is held against how far the optimizer may have moved it where that is more: a bias that begins at zero makes whole steps
by the sign of what may be rounding. Elements whose gradient is rounding alone stay out (`rounding.comparable`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.compare.finding import Finding, finding_of
from dtgpt.compare.record import Record
from dtgpt.compare.shared_state import WEIGHT, Apart

KINDS = ("first gradient", "last gradient", "weight")  # of tensors in a record
ROUNDINGS = 4.0  # by which two runs may be apart, where one differs from a third by rounding alone


class Limits(NamedTuple):
    """The largest relative differences that rounding explains."""

    first_loss: float
    first_gradient: float  # of a tensor, or of the norm
    loss: float  # of later steps, and on validation text
    tensors: float  # of the last gradient, of weights, and of the norms of later steps
    weights: float | None = None  # None: as other tensors


def limits_of(record: Record) -> Limits:
    """Return the limits of a plan that `record` tells of, for a model that multiplies no rounding."""
    if record.rounding == "none":
        return Limits(0.0, 0.0, 0.0, 0.0)
    eps = record.eps
    if record.dtype == "torch.float32":
        return Limits(2e-6, 1e-5, 1e-5, 1e-4)
    loss, gradient = {"order": (2e-6, 1e-5), "sums": (eps / 64, eps), "products": (eps / 4, 2 * eps)}[record.rounding]
    return Limits(loss, gradient, eps / 4, 2 * eps)


def limits_between(record: Record, reference: Record) -> Limits:
    """Return the limits of a run that `record` tells of. Where its precision is not that of the reference, they are
    those of the coarser one, and weights have none: elements of a gradient that are less than its rounding move them by
    chance. `dtgpt.compare.gate` judges the others."""
    if (record.dtype, record.fp8) == (reference.dtype, reference.fp8):
        return limits_of(record)
    eps = max(record.eps_of_products, reference.eps_of_products)
    return Limits(first_loss=eps, first_gradient=4 * eps, loss=eps, tensors=4 * eps, weights=math.inf)


@dataclass
class Difference:
    """The relative differences of a run from its reference."""

    losses: list[float]  # of each step
    norms: list[float]
    rates: list[tuple[float, float]]  # learning rates, and those of the reference
    scales: list[tuple[float, float]]  # loss scales, likewise
    skipped: tuple[list[int], list[int]]  # steps that fp16 skipped, likewise; the first is 1
    tensors: dict[str, float]  # by their keys in `Record.tensors`; without gradients of steps that fp16 skipped
    same_initial: bool
    apart: list[Apart] = field(default_factory=list)  # weights and the optimizer's state
    held_out: float = 0.0  # of the validation losses

    @property
    def loss(self) -> float:
        return largest(self.losses)

    @property
    def norm(self) -> float:
        return largest(self.norms)

    @property
    def first_gradient(self) -> float:
        return self.worst(KINDS[0])[0]

    @property
    def last_gradient(self) -> float:
        return self.worst(KINDS[1])[0]

    @property
    def gradient(self) -> float:
        return largest([self.first_gradient, self.last_gradient])

    @property
    def weight(self) -> float:
        return self.worst(KINDS[2])[0]

    @property
    def same_skips(self) -> bool:
        return self.skipped[0] == self.skipped[1]

    @property
    def applied(self) -> int:
        """Steps of the reference that changed weights."""
        return len(self.norms) - len(self.skipped[1])

    def within(self, loss: float, tensors: float) -> bool:
        """Return whether losses, and norms, gradients and weights, are as near as this, and all else is equal."""
        return not problems(self, Limits(loss, tensors, loss, tensors))

    def worst(self, kind: str, explained: Mapping[str, float] = MappingProxyType({})) -> tuple[float, str]:
        """Return (difference, key) of the tensor of a kind with the largest difference that is not `explained`, by its
        key; (0, "") where there is none."""
        some = [(value, key) for key, value in self.tensors.items() if key.startswith(f"{kind}/")]
        outside = [(value, key) for value, key in some if not value <= explained.get(key, 0.0)]
        return max(outside, key=lambda pair: (math.isnan(pair[0]), pair[0]), default=(0.0, ""))


def difference(record: Record, reference: Record, least: float = 0.0) -> Difference:
    """Return the differences. That of a gradient is held against `least` of the norm of all gradients where that is
    more than its own norm."""
    runs = record, reference
    ours, theirs = ([step for step, norm in enumerate(run.norms, 1) if math.isinf(norm)] for run in runs)
    last = len(reference.norms)
    left_out = {kind for kind, step in ((KINDS[0], 1), (KINDS[1], last)) if step in {*ours, *theirs}}
    tensors = tensor_differences(record, reference, least)
    return Difference(
        losses=[relative(*pair) for pair in zip(record.losses, reference.losses, strict=True)],
        norms=[relative(*pair) for pair in zip(record.norms, reference.norms, strict=True)],
        rates=list(zip(record.rates, reference.rates, strict=True)),
        scales=list(zip(record.scales, reference.scales, strict=False)),  # a run in another precision has none
        skipped=(ours, theirs),
        tensors={name: value for name, value in tensors.items() if name.partition("/")[0] not in left_out},
        same_initial=record.initial == reference.initial,
        apart=record.apart,
        held_out=held_out_difference(record.held_out, reference.held_out),
    )


def problems(found: Difference, limits: Limits, rounded: Iterable[Difference] = ()) -> list[str]:
    """Return what is further from the reference than rounding explains, a sentence each; none where all is right.

    `rounded`: runs that differ from the same reference by rounding alone. What they differ by in the same quantity is
    accepted `ROUNDINGS` times, in addition to the limits. Of the curves, the step at which each parts is named, the
    earliest first.
    """
    said = [] if found.same_initial else ["initial weights differ"]
    if not found.same_skips:
        return [*said, f"skips steps {found.skipped[0]}, one process {found.skipped[1]}"]
    rounded = [other for other in rounded if other.same_skips]
    curves = [
        _parting("loss", found.losses, limits.first_loss, limits.loss, [other.losses for other in rounded]),
        _parting(
            "gradient norm", found.norms, limits.first_gradient, limits.tensors, [other.norms for other in rounded]
        ),
        _first_unequal("loss scale", found.scales),
        _first_unequal("learning rate", found.rates),
    ]
    said += [sentence for _, sentence in sorted(filter(None, curves), key=lambda parting: parting[0])]
    explained = {key: _limit_of_kind(key, limits) + _rounding(key, rounded) for key in found.tensors}
    for kind in KINDS:
        worst, key = found.worst(kind, explained)
        if key:
            said.append(f"{key.replace('/', ' of ')} differs by {worst:.1e}")
    first = {apart.step: apart for apart in reversed(unexplained(found, limits, rounded))}
    said += [str(first[step]) for step in sorted(first)]
    if not found.held_out <= limits.loss + ROUNDINGS * max((other.held_out for other in rounded), default=0.0):
        said.append(f"the validation loss differs by {found.held_out:.1e}")
    return said


def unexplained(found: Difference, limits: Limits, rounded: Sequence[Difference] = ()) -> list[Apart]:
    """Return the weights and states of the optimizer that are further apart than rounding explains: the earliest first,
    states before the weights that they move, and then the furthest. Before the last step begins with the state of one
    process, runs of another precision may be any distance apart, and any runs where older code, which kept no state,
    shows what rounding does."""
    shown: dict[tuple[object, ...], float] = {}
    for other in (each for one in rounded for each in one.apart):
        keys = [other[:3], (other.step, other.kind)]
        shown |= {key: max(shown.get(key, 0.0), other.difference) for key in keys}
    last, outside = max((apart.step for apart in found.apart), default=0), []
    for apart in found.apart:
        if apart.step < last and rounded and not shown:
            continue
        explained = ROUNDINGS * shown.get(apart[:3], 0.0)
        limit = limits.tensors
        if limits.weights is not None and (apart.kind == WEIGHT or apart.step < last):
            limit = limits.weights
        if apart.kind == WEIGHT:
            explained = max(explained, 2 * shown.get((apart.step, WEIGHT), 0.0))  # as in `_rounding`
        if not apart.difference <= limit + explained:
            outside.append(apart)
    return sorted(outside, key=lambda apart: (apart.step, apart.kind == WEIGHT, -apart.difference))


def first_state(found: Difference, limits: Limits, rounded: Sequence[Difference]) -> Finding | None:
    """Return the first weight or state of the optimizer that rounding does not explain."""
    for step, kind, name, apart, rank in unexplained(found, limits, rounded)[:1]:
        tensor = name if kind == WEIGHT else f"{kind} of {name}"
        facts = {"module": name.rpartition(".")[0], "tensor": tensor, "rank": rank, "step": step}
        return finding_of(apart, "fault", kind=kind if kind == WEIGHT else "state", **facts)
    return None


def held_out_difference(ours: float | None, theirs: float | None) -> float:
    """Return the relative difference of validation losses; 0 where either is not there."""
    return 0.0 if ours is None or theirs is None else relative(ours, theirs)


def _limit_of_kind(key: str, limits: Limits) -> float:
    if key.startswith("weight/") and limits.weights is not None:
        return limits.weights
    return limits.first_gradient if key.startswith(KINDS[0]) else limits.tensors


def _rounding(key: str, rounded: Sequence[Difference]) -> float:
    """Return what rounding explains of the difference of a tensor. Some optimizers make whole steps of gradients
    that are rounding, by their sign: in which bias an element turns is chance, so that any weight may differ by twice
    as much as the one that differs most."""
    own = ROUNDINGS * max((other.tensors.get(key, 0.0) for other in rounded), default=0.0)
    return max([own, *(2 * other.weight for other in rounded)]) if key.startswith("weight/") else own


def _parting(
    name: str, values: list[float], first: float, later: float, rounded: list[list[float]]
) -> tuple[int, str] | None:
    """Return the first step at which a curve is beyond its limit, with a sentence. Rounding that a run of `rounded`
    has shown at a step explains as much at all later ones."""
    shown = [0.0] * len(values)
    for other in rounded:
        shown = list(map(max, shown, accumulate(other, max)))
    for step, (value, rounding) in enumerate(zip(values, shown, strict=True), 1):
        if not value <= (first if step == 1 else later) + ROUNDINGS * rounding:
            return step, f"the {name} diverges at step {step}, by {value:.1e}"
    return None


def _first_unequal(name: str, pairs: list[tuple[float, float]]) -> tuple[int, str] | None:
    for step, (ours, theirs) in enumerate(pairs, 1):
        if ours != theirs:
            return step, f"the {name} of step {step} is {ours:.6g}, that of one process {theirs:.6g}"
    return None


def tensor_differences(record: Record, reference: Record, least: float = 0.0) -> dict[str, float]:
    """Return the relative difference of each tensor of the reference; `least` as of `difference`."""
    found = {}
    judged = {name: value for name, value in reference.tensors.items() if name.partition("/")[0] in KINDS}
    for name, theirs in judged.items():
        kind, floor = name.partition("/")[0], reference.travel * math.sqrt(theirs.numel())
        if kind != KINDS[2]:
            floor = least * reference.norms[0 if kind == KINDS[0] else -1]
        scale = torch.linalg.vector_norm(theirs, dtype=torch.float64).clamp(min=floor).item()
        found[name] = _ratio(_distance(record.tensors[name], theirs), scale)
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    return torch.linalg.vector_norm(a - b, dtype=torch.float64).item()


def _ratio(distance: float, scale: float) -> float:
    return distance / scale if scale > 0 else (0.0 if distance == 0 else math.inf)


def relative(ours: float, theirs: float) -> float:
    """Return |ours - theirs| / |theirs|: 0 where both are the same infinity, NaN where either is."""
    return 0.0 if ours == theirs else _ratio(abs(ours - theirs), abs(theirs))


def largest(values: Sequence[float]) -> float:
    """Return the largest value, NaN where one is; 0 of none."""
    return max(values, key=lambda value: (math.isnan(value), value), default=0.0)
