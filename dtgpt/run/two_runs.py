"""`dtgpt compare RUN_A RUN_B`: whether the curves of two runs are equal, within rounding, or part, and what differs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from dtgpt.run.fact_differences import Group, differences
from dtgpt.run.facts import Run, open_run_or_metrics
from dtgpt.run.two_curves import Metric, Point, compare_curves, first_difference
from dtgpt.util.errors import UserError

GIVEN = "--tolerance"  # of the command line


class Tolerance(NamedTuple):
    """The largest accepted distance of two losses, and its source: `GIVEN`, or a precision such as fp32."""

    value: float
    source: str


@dataclass(frozen=True)
class TwoRuns:
    """Two runs with what was compared of them."""

    a: Run
    b: Run
    metrics: list[Metric]  # with one at least that decides
    groups: dict[str, Group]
    tolerance: Tolerance

    @property
    def deciding(self) -> list[Metric]:
        return [metric for metric in self.metrics if metric.decides]

    @cached_property
    def parting(self) -> tuple[Metric, Point] | None:
        """The metric and the point at which the runs part; None where they do not."""
        points = [(metric, metric.parting(self.tolerance.value)) for metric in self.deciding]
        return min(((m, p) for m, p in points if p is not None), key=lambda pair: pair[1].step, default=None)

    @cached_property
    def steps(self) -> list[int]:
        """The steps at which both runs have recorded the same kind of loss."""
        return sorted({point.step for metric in self.deciding for point in metric.points})

    @cached_property
    def equal_until(self) -> int | None:
        """The last of `steps` before the first loss that differs in a bit; None where the first one does."""
        differing = (point.step for metric in self.deciding for point in metric.points if point.distance)
        first = min(differing, default=None)
        return max((step for step in self.steps if first is None or step < first), default=None)

    @property
    def is_equal(self) -> bool:
        """Whether all losses that can be compared are equal bit for bit."""
        return self.equal_until == self.steps[-1]

    def seen(self) -> tuple[str, int, float, float] | None:
        """Return (samples or tokens, step, number, number) of the first step after which the runs have seen different
        numbers of them; None where there is none."""
        for name in ("samples", "tokens"):
            found = first_difference(*(run.curves.of.get(name, {}) for run in (self.a, self.b)))
            if found is not None:
                return name, *found
        return None


def compare_runs(a: Path, b: Path, tolerance: float | None, by_precision: Mapping[str, float]) -> TwoRuns:
    """Return the comparison of two run folders, or metrics.jsonl files. tolerance: of losses; None: the one of the
    precision, of which `by_precision` has the names. Raise UserError where they cannot be compared."""
    runs = open_run_or_metrics(a), open_run_or_metrics(b)
    if runs[0].metrics.samefile(runs[1].metrics):
        raise UserError(f"{a} and {b} are the same run, which equals itself; give two runs")
    metrics = compare_curves(runs[0].curves, runs[1].curves, (runs[0].interval, runs[1].interval))
    if not any(metric.decides for metric in metrics):
        has = " and ".join(f"{run.path} has {_recorded(run)}" for run in runs)
        raise UserError(
            f"{has}: the runs have no step in common; train both with the same log.interval and log.eval_interval"
        )
    limit = _tolerance(runs, by_precision) if tolerance is None else Tolerance(tolerance, GIVEN)
    return TwoRuns(*runs, metrics, differences(*runs), limit)


def _recorded(run: Run) -> str:
    training = run.curves.losses()
    curve = training or run.curves.of["validation_loss"]
    return f"{'losses' if training else 'validation losses'} of steps {next(iter(curve))} to {next(reversed(curve))}"


def _tolerance(runs: tuple[Run, Run], by_precision: Mapping[str, float]) -> Tolerance:
    """Return the largest tolerance of the precisions in which the runs were trained; that of an unknown one is the
    largest of all, that of a run which has not recorded it the smallest."""
    names = [name for run in runs for name in _precisions(run)]
    if not names:
        least = min(by_precision, key=lambda name: by_precision[name])
        return Tolerance(by_precision[least], f"{least}, as the precision was not recorded")
    most = max(by_precision.values())
    name = max(names, key=lambda name: by_precision.get(name, most))
    return Tolerance(by_precision.get(name, most), name)


def _precisions(run: Run) -> set[str]:
    found: set[str] = set()
    for piece in run.pieces():
        name = piece.facts.get("start/precision") or piece.facts.get("recipe/precision")
        device = piece.facts.get("start/device")
        if name == "auto":
            name = None if device is None else "fp32" if device.startswith("CPU") else "bf16"
        if name:
            found.add(name)
    return found
