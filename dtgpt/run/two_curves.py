"""How far the curves of two runs are apart: pure functions of what both have recorded.

The distance of two values is |a - b| / max(|a|, |b|), so that the order of the runs does not matter. Losses decide
whether two runs part; gradient norm, learning rate and figures of tasks are shown beside them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dtgpt.run.curves import HELD_OUT, TRAINING, Curve, Curves

NAMES = {
    "step_loss": "loss of the step", "loss": "mean loss of an interval", "validation_loss": "validation loss",
    "test_loss": "test loss", "grad_norm": "gradient norm", "lr": "learning rate",
}  # fmt: skip


class Point(NamedTuple):
    """A metric at a step that both runs have recorded."""

    step: int
    a: float
    b: float
    distance: float  # inf where one is not a number


@dataclass(frozen=True)
class Metric:
    """A metric of two runs at their common steps, of which there is one at least. decides: whether runs part where it
    does."""

    name: str
    points: tuple[Point, ...]
    decides: bool

    @property
    def title(self) -> str:
        return NAMES.get(self.name, self.name)

    @cached_property
    def largest(self) -> Point:
        return max(self.points, key=lambda point: point.distance)

    @cached_property
    def equal_until(self) -> int | None:
        """The last common step before the first difference of a bit; None where already the first one differs."""
        first = next((i for i, point in enumerate(self.points) if point.distance), len(self.points))
        return self.points[first - 1].step if first else None

    @property
    def is_equal(self) -> bool:
        return self.equal_until == self.points[-1].step

    def parting(self, tolerance: float) -> Point | None:
        """Return the first point with a larger distance than `tolerance`."""
        return next((point for point in self.points if point.distance > tolerance), None)

    def before(self, step: int) -> Point | None:
        """Return the point with the largest distance before `step`, None where there is no such point."""
        return max((p for p in self.points if p.step < step), key=lambda point: point.distance, default=None)


def distance(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|); inf where one of them is not a number."""
    if a == b:
        return 0.0
    size = max(abs(a), abs(b))
    far = abs(a / size - b / size)  # the difference itself may be beyond what a float holds
    return far if math.isfinite(far) else math.inf


def compare_curves(a: Curves, b: Curves, intervals: tuple[int | None, int | None]) -> list[Metric]:
    """Return the metrics that both runs have at a common step, losses first. intervals: `log.interval` of each run,
    None where it is not known or was changed. Mean losses are compared where both are means over the same steps."""
    found: list[Metric] = []
    for name in sorted(a.of.keys() & b.of.keys(), key=_place):
        if name in ("samples", "tokens"):
            continue
        points = _common(a.of[name], b.of[name], decides=name in TRAINING + HELD_OUT)
        if name == "loss":
            points = _same_means(points, intervals, has_steps=bool(found))
            if all(_is_step_loss(run, points) for run in (a, b)):
                continue
        if points:
            found.append(Metric(name, tuple(points), name in TRAINING + HELD_OUT))
    return found


def _place(name: str) -> tuple[int, str]:
    return (list(NAMES).index(name) if name in NAMES else len(NAMES)), name


def _common(a: Curve, b: Curve, decides: bool) -> list[Point]:
    """Return the points at common steps. What is not a number in either run is kept of losses alone: in gradient norms
    it is an overflow of fp16."""
    pairs = ((step, value, b[step]) for step, value in a.items() if step in b)
    kept = [(step, x, y) for step, x, y in pairs if decides or not (math.isnan(x) and math.isnan(y))]
    return [Point(step, x, y, distance(x, y)) for step, x, y in kept]


def _same_means(points: list[Point], intervals: tuple[int | None, int | None], has_steps: bool) -> list[Point]:
    """Return the points at which both mean losses begin after the same step. Where that is not known: none if there are
    losses of single steps, else all."""
    one, other = intervals
    if one is None or other is None:
        return [] if has_steps else points
    return [p for p in points if (p.step - 1) // one * one == (p.step - 1) // other * other]


def _is_step_loss(run: Curves, points: list[Point]) -> bool:
    """Return whether the mean losses are those of single steps, which stand in the metrics already."""
    steps, means = run.of.get("step_loss", {}), run.of["loss"]
    return all(steps.get(point.step) == means[point.step] for point in points)


def first_difference(a: Curve, b: Curve) -> tuple[int, float, float] | None:
    """Return (step, value, value) of the first common step with different values; None where there is none."""
    return next(((step, x, b[step]) for step, x in a.items() if step in b and x != b[step]), None)
