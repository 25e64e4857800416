"""`dtgpt compare RUN_A RUN_B`: whether the curves of two runs are equal, within rounding, or part, and what differs.

The distance of two values is |a - b| / max(|a|, |b|), so that the order of the runs does not matter. Losses decide
whether two runs part; gradient norm, learning rate and figures of tasks are shown with them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.compare.history import HELD_OUT, TRAINING, Curve, Curves, Run, open_run_or_metrics
from dtgpt.data.dataset import PERPLEXITIES
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.shared.option_words import value_text

GIVEN = "--tolerance"  # of the command line
NAMES = {
    "step_loss": "loss of the step",
    "loss": "mean loss of an interval",
    "validation_loss": "validation loss",
    "test_loss": "test loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}
NOT_RECORDED = "not recorded"
SAME = {value_text(None), NOT_RECORDED}  # an option that is not set, and a version that does not have it
UNCOMPARED = {"samples", "tokens", *PERPLEXITIES}  # counts, and what follows from losses
# How a step is computed: its result may differ by rounding.
EXECUTION = (
    "plan",
    "world",
    "micro_batch_size",
    "precision",
    "attention",
    "recompute",
    "recompute_blocks",
    "reduce",
    "compile",
    "graph",
    "device",
    "torch",
)
# Fields of a recipe without influence on a curve; of these sections, all but what is measured on the way.
WITHOUT_INFLUENCE = ("name", "timeout", "runs", "resume", "exit_after", "exit_interval")
SECTIONS = ("log.", "checkpoint.")
MEASURES = ("log.eval_samples", "log.eval_tasks", "log.eval_tasks_limit")
MASKS = ("data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss")  # what is done with the tokens


class Point(NamedTuple):
    """A metric at a step that both runs have recorded."""

    step: int
    a: float
    b: float
    distance: float  # inf where one is not a number


@dataclass(frozen=True)
class Metric:
    """A metric of two runs at their common steps, of which there is one at least."""

    name: str
    points: list[Point]

    @property
    def title(self) -> str:
        return shown_name(NAMES.get(self.name, self.name))

    @property
    def decides(self) -> bool:
        """Whether runs part where the metric does."""
        return self.name in TRAINING + HELD_OUT

    @cached_property
    def largest(self) -> Point:
        return max(self.points, key=lambda point: point.distance)

    @property
    def equal_until(self) -> int | None:
        """The last common step before the first difference of a bit; None where already the first one differs."""
        return _equal_until(self.points)

    @property
    def is_equal(self) -> bool:
        return not self.largest.distance

    def parting(self, tolerance: float) -> Point | None:
        """Return the first point with a larger distance than `tolerance`."""
        return next((point for point in self.points if point.distance > tolerance), None)


def _equal_until(points: Iterable[Point]) -> int | None:
    points = list(points)
    first = min((point.step for point in points if point.distance), default=math.inf)
    return max((point.step for point in points if point.step < first), default=None)


def distance(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|); inf where one of them is not a number."""
    if a == b:
        return 0.0
    size = max(abs(a), abs(b))
    far = abs(a / size - b / size)  # the difference itself may be beyond what a float holds
    return far if math.isfinite(far) else math.inf


def compare_curves(a: Run, b: Run) -> list[Metric]:
    """Return the metrics that both runs have at a common step, losses first. Mean losses are compared where both are
    means over the same steps; where that is not known, if there are no losses of single steps."""
    one, other = a.curves.of, b.curves.of
    order = {name: place for place, name in enumerate(NAMES)}
    found: list[Metric] = []
    for name in sorted(one.keys() & other.keys() - UNCOMPARED, key=lambda n: (order.get(n, len(order)), n)):
        metric = Metric(name, _common(one[name], other[name], is_loss=name in TRAINING + HELD_OUT))
        if name == "loss":
            if a.interval is None or b.interval is None:
                points = [] if found else metric.points
            else:
                begins = [[(p.step - 1) // every * every for p in metric.points] for every in (a.interval, b.interval)]
                points = [p for p, x, y in zip(metric.points, *begins, strict=True) if x == y]
            metric = Metric(name, points)
            if all(_are_single_steps(run.curves, points) for run in (a, b)):
                continue  # the losses of the steps stand in the metrics already
        if metric.points:
            found.append(metric)
    return found


def _common(a: Curve, b: Curve, is_loss: bool) -> list[Point]:
    """Return the points at common steps. What is not a number in either run is kept of losses alone: in gradient norms
    it is an overflow of fp16."""
    pairs = ((step, value, b[step]) for step, value in a.items() if step in b)
    kept = [(step, x, y) for step, x, y in pairs if is_loss or not (math.isnan(x) and math.isnan(y))]
    return [Point(step, x, y, distance(x, y)) for step, x, y in kept]


def _are_single_steps(run: Curves, points: list[Point]) -> bool:
    steps, means = run.of.get("step_loss", {}), run.of["loss"]
    return all(steps.get(point.step) == means[point.step] for point in points)


class Field(NamedTuple):
    """A field with its values in both runs."""

    name: str
    a: str
    b: str


class FieldGroup(NamedTuple):
    """The fields of a kind whose values in two runs are not the same text."""

    title: str
    fields: list[Field]
    without: str  # runs that have not recorded the kind, as in "A and B"

    @classmethod
    def of(cls, title: str, fields: list[Field], recorded: Iterable[bool]) -> "FieldGroup":
        """recorded: whether A has recorded the kind, and whether B has."""
        without = [letter for letter, known in zip("AB", recorded, strict=True) if not known]
        return cls(title, fields, " and ".join(without))

    @property
    def differing(self) -> list[Field]:
        """The fields that both runs have recorded."""
        return [one for one in self.fields if NOT_RECORDED not in (one.a, one.b)]

    @property
    def listed(self) -> list[Field]:
        return self.differing if self.without else self.fields  # without a recipe, each field is not recorded

    @property
    def is_equal(self) -> bool:
        return not self.without and not self.differing


def differences(a: Run, b: Run) -> dict[str, FieldGroup]:
    """Return in what the last starts of two runs differ, in groups: "recipe" and "data" decide the curve, "code" should
    not change it, "execution" changes its rounding alone. Fields that do not change it are left out."""
    recipes, starts = (a.recipe, b.recipe), (a.start, b.start)
    names = sorted({*a.recipe, *b.recipe})
    of_data = [name for name in names if name.startswith("data.") and name not in MASKS]
    tables = [name for name in names if name.startswith("plans.")]
    others = {*of_data, *tables, *EXECUTION, *WITHOUT_INFLUENCE}
    measured = [name for name in names if not name.startswith(SECTIONS) or name in MEASURES]
    data = FieldGroup.of("data", fields_of(("data", "tokenizer"), starts), ("data" in start for start in starts))
    if not data.is_equal:  # else they are the same tokens, wherever they are
        data.fields.extend(fields_of(of_data, recipes))
    execution = fields_of(tables, recipes)
    for name in EXECUTION:  # what `auto` meant, where both have recorded that
        execution += fields_of((name,), starts if all(name in start for start in starts) else recipes)
    with_plan = ("plan" in start or "plan" in recipe for start, recipe in zip(starts, recipes, strict=True))
    decides = fields_of([name for name in measured if name not in others], recipes)
    groups = [
        FieldGroup.of("recipe", decides, ("seed" in recipe for recipe in recipes)),
        data,
        FieldGroup.of("code", fields_of(("code", "git"), starts), ("code" in start for start in starts)),
        FieldGroup.of("execution", execution, with_plan),
    ]
    return {group.title: group for group in groups}


def fields_of(names: Iterable[str], values: Sequence[Mapping[str, Any]]) -> list[Field]:
    """Return the fields whose texts in both `values` differ."""
    fields = (Field(name, *(_text(own, name) for own in values)) for name in names)
    return [one for one in fields if one.a != one.b and {one.a, one.b} != SAME]


def _text(values: Mapping[str, Any], name: str) -> str:
    return shown_name(value_text(values[name])) if name in values else NOT_RECORDED


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
    groups: dict[str, FieldGroup]
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
        return _equal_until(point for metric in self.deciding for point in metric.points)

    @property
    def is_equal(self) -> bool:
        """Whether all losses that can be compared are equal bit for bit."""
        return all(metric.is_equal for metric in self.deciding)

    def seen(self) -> tuple[str, int, float, float] | None:
        """Return (samples or tokens, step, number, number) of the first step after which the runs have seen different
        numbers of them; None where there is none."""
        for name in ("samples", "tokens"):
            a, b = (run.curves.of.get(name, {}) for run in (self.a, self.b))
            for step in a:
                if step in b and a[step] != b[step]:
                    return name, step, a[step], b[step]
        return None


def compare_runs(a: Path, b: Path, tolerance: float | None, by_precision: Mapping[str, float]) -> TwoRuns:
    """Return the comparison of two run folders, or metrics.jsonl files. tolerance: of losses; None: the one of the
    precision, of which `by_precision` has the names. Raise UserError where they cannot be compared."""
    runs = open_run_or_metrics(a), open_run_or_metrics(b)
    if runs[0].metrics.samefile(runs[1].metrics):
        raise UserError(f"{a} and {b} are the same run, which equals itself; give two runs")
    metrics = compare_curves(*runs)
    if not any(metric.decides for metric in metrics):
        has = " and ".join(f"{run.path} has {_recorded(run)}" for run in runs)
        raise UserError(
            f"{has}: the runs have no step in common; train both with the same log.interval and log.eval_interval"
        )
    limit = _tolerance(runs, by_precision) if tolerance is None else Tolerance(tolerance, GIVEN)
    return TwoRuns(*runs, metrics, differences(*runs), limit)


def _recorded(run: Run) -> str:
    curve = run.curves.losses
    kind = "validation losses" if curve is run.curves.of.get("validation_loss") else "losses"
    return f"{kind} of steps {next(iter(curve))} to {next(reversed(curve))}"


def _tolerance(runs: tuple[Run, Run], by_precision: Mapping[str, float]) -> Tolerance:
    """Return the largest tolerance of the precisions in which the runs were trained; that of an unknown one is the
    largest of all, that of a run which has not recorded it the smallest."""
    names = [name for run in runs if (name := _precision(run))]
    if not names:
        least = min(by_precision, key=lambda name: by_precision[name])
        return Tolerance(by_precision[least], f"{least}, as the precision was not recorded")
    most = max(by_precision.values())
    name = max(names, key=lambda name: by_precision.get(name, most))
    return Tolerance(by_precision.get(name, most), name)


def _precision(run: Run) -> str | None:
    name, device = run.start.get("precision", run.recipe.get("precision")), run.start.get("device")
    if name == "auto":
        return None if device is None else "fp32" if str(device).startswith("CPU") else "bf16"
    return None if name is None else str(name)
