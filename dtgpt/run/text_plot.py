"""Curves as text for a terminal."""

import math
from collections.abc import Iterable

MARKS, BOTH = "ox", "*"  # of the first curve, of the second one, and of both in one place
LABEL = 10  # columns left of a plot
Points = list[tuple[int, float]]  # step and value


def plot_losses(curves: list[Points], width: int, height: int = 10) -> list[str]:
    """Return the lines of a plot of one or two curves over the same axes, the means of the steps of each column; none
    where there is nothing to draw. Values that are not finite are left out."""
    curves = [[(step, value) for step, value in curve if math.isfinite(value)] for curve in curves]
    columns = Columns([step for curve in curves for step, _ in curve], width)
    means = [{c: _mean(values) for c, values in _by_column(curve, columns).items()} for curve in curves]
    values = [value for own in means for value in own.values()]
    low, high = min(values, default=0.0), max(values, default=math.inf)
    if not math.isfinite(high - low):
        return []
    rows = [[" "] * columns.width for _ in range(height)]
    for mark, own in zip(MARKS, means, strict=False):
        for column, value in own.items():
            row = round((high - value) / (high - low) * (height - 1)) if high > low else height // 2
            rows[row][column] = mark if rows[row][column] == " " else BOTH
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"} if high > low else {height // 2: f"{high:.4g}"}
    return [*_labelled(rows, labels), columns.axis()]


def plot_distances(curve: Points, width: int) -> list[str]:
    """Return the lines of a plot of distances (0 or more, inf: not a number): the largest of each column, by its power
    of ten; none where all are 0."""
    columns = Columns([step for step, _ in curve], width)
    largest = {column: max(values) for column, values in _by_column(curve, columns).items()}
    powers = [_power(value) for value in largest.values() if 0 < value < math.inf]
    if not any(largest.values()):
        return []
    names = ["nan"] * (math.inf in largest.values())
    names += [f"1e{power:+03d}" for power in range(max(powers, default=0), min(powers, default=1) - 1, -1)]
    names += ["equal"] * (0.0 in largest.values())
    rows = [[" "] * columns.width for _ in names]
    for column, value in largest.items():
        name = "nan" if value == math.inf else f"1e{_power(value):+03d}" if value else "equal"
        rows[names.index(name)][column] = BOTH
    return [*_labelled(rows, dict(enumerate(names))), columns.axis()]


class Columns:
    """The columns of a plot, over which the steps are spread evenly."""

    def __init__(self, steps: Iterable[int], width: int):
        steps = list(steps) or [0]
        self.first, self.last = min(steps), max(steps)
        self.width = max(1, min(width - LABEL - 2, self.last - self.first + 1))

    def of(self, step: int) -> int:
        span = self.last - self.first
        return (step - self.first) * (self.width - 1) // span if span else 0

    def axis(self) -> str:
        last = str(self.last) if self.last > self.first else ""
        return f"{'step':>{LABEL}}  {self.first}{last:>{max(0, self.width - len(str(self.first)))}}"


def _power(value: float) -> int:
    return math.floor(math.log10(value))


def _by_column(curve: Points, columns: Columns) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step, value in curve:
        found.setdefault(columns.of(step), []).append(value)
    return found


def _mean(values: list[float]) -> float:
    return sum(value / len(values) for value in values)


def _labelled(rows: list[list[str]], labels: dict[int, str]) -> list[str]:
    return [f"{labels.get(i, ''):>{LABEL}} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
