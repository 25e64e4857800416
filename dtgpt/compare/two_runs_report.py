"""What `dtgpt compare RUN_A RUN_B` prints."""

import math
from collections.abc import Iterator

from dtgpt.charts.plot import sparkline
from dtgpt.compare.history import Run
from dtgpt.compare.two_runs import GIVEN, FieldGroup, Metric, Point, TwoRuns
from dtgpt.util.console import counted
from dtgpt.util.errors import shown_name
from dtgpt.util.shared.words import hanging, terminal_width

EXPLANATIONS = {
    "recipe": "what decides the curve",
    "data": "the tokens and their order",
    "code": "dtgpt's source files",
    "execution": "which changes rounding alone",
}


def report(two: TwoRuns) -> str:
    """Return the curves, how far they are apart, the fields that differ and, last, the verdict."""
    fields = [line for group in two.groups.values() for line in _group_lines(group)]
    parts = [_heads(two), _curves(two), _table(two), fields, _verdict(two)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _heads(two: TwoRuns) -> Iterator[str]:
    for letter, run in (("A", two.a), ("B", two.b)):
        yield hanging(f"{letter}  {shown_name(str(run.path))}: {_extent(run)}", 3)
        notes = list(run.problems)
        if run.curves.dropped:
            notes.append(f"{counted(run.curves.dropped, 'record')} of steps that were taken again later are left out")
        if run.curves.unread:
            notes.append(f"{counted(run.curves.unread, 'line')} of {run.metrics.name} cannot be read and are left out")
        for note in notes:
            yield hanging(f"   {note}", 5)
    recorded = [{step for m in two.deciding for step in run.curves.of[m.name]} for run in (two.a, two.b)]
    if any(set(two.steps) != own for own in recorded):
        counts = " and ".join(f"{len(own):,}" for own in recorded)
        yield hanging(f"   compared: the {counted(len(two.steps), 'common step')} of {counts} with a recorded loss", 5)
    if two.a.curves.last != two.b.curves.last:
        last, letter = min((two.a.curves.last, "A"), (two.b.curves.last, "B"))
        yield f"   {letter} ends at step {last}: what the other run recorded later is not compared"
    if (seen := two.seen()) is not None:
        name, step, a, b = seen
        yield f"   {name} seen differ from step {step} on: {a:,.0f} and {b:,.0f}: equal steps are not equal {name}"


def _extent(run: Run) -> str:
    """Return `steps 1 to 60 of 100, log.interval 5; it ended early or is still being trained`."""
    steps = f"steps {next(iter(run.curves.losses))} to {run.curves.last}"
    interval = "" if run.interval is None else f", log.interval {run.interval}"
    if run.steps is None:
        return steps + interval
    early = "; it ended early or is still being trained" if run.curves.last < run.steps else ""
    return f"{steps} of {run.steps}{interval}{early}"


def _curves(two: TwoRuns) -> Iterator[str]:
    yield "loss (nats per token)"
    for letter, run in (("A", two.a), ("B", two.b)):
        yield f"{letter}  {sparkline(list(run.curves.losses.values()))}"


def _table(two: TwoRuns) -> Iterator[str]:
    width = max(len(metric.title) for metric in two.metrics)
    yield f"{'':<{width}}    steps  equal to step   largest   at step"
    for metric in two.metrics:
        equal = "none" if metric.equal_until is None else "all" if metric.is_equal else str(metric.equal_until)
        far = "nan" if metric.largest.distance == math.inf else f"{metric.largest.distance:.1e}"
        last = f"{'0':>8}" if metric.is_equal else f"{far:>8}{metric.largest.step:>10}"
        yield f"{metric.title:<{width}}{len(metric.points):>9}{equal:>15}  {last}"


def _group_lines(group: FieldGroup) -> Iterator[str]:
    """Yield the state of a group, and the fields in which the runs differ."""
    state = "the same" if group.is_equal else "differs" if group.differing else f"not recorded by {group.without}"
    yield f"{group.title:<10} {state}  ({EXPLANATIONS[group.title]})"
    columns = terminal_width() or math.inf
    names = max((len(field.name) for field in group.listed), default=0)
    values = max((len(field.a) for field in group.listed), default=0)
    for name, a, b in group.listed:
        line = f"  {shown_name(name):<{names}}  A {a:<{values}}  B {b}"
        if len(line) <= columns:
            yield line
        else:
            yield f"  {shown_name(name)}"
            yield hanging(f"    A {a}", 6)
            yield hanging(f"    B {b}", 6)


def _verdict(two: TwoRuns) -> Iterator[str]:
    """Yield whether the curves are equal, within rounding or diverge, and why that may be."""
    limit = f"the tolerance of {two.tolerance.value:g} ({two.tolerance.source})"
    steps = f"{counted(len(two.steps), 'common step')}, {two.steps[0]} to {two.steps[-1]}"
    equal = "" if two.equal_until is None else f"; equal bit for bit up to step {two.equal_until}"
    if two.is_equal:
        yield hanging(f"equal bit for bit: all losses of {steps}", 2)
    elif two.parting is None:
        metric = max(two.deciding, key=lambda metric: metric.largest.distance)
        far = f"at most {metric.largest.distance:.1e} ({metric.title}, step {metric.largest.step})"
        what = "tolerance" if two.tolerance.source == GIVEN else "rounding"
        yield hanging(f"equal within {what}: {far}, not above {limit}, at {steps}{equal}", 2)
    else:
        metric, point = two.parting
        what = f"{point.step}: {metric.title} {_values(point)}, the first record above {limit}"
        yield hanging(f"diverge at step {what}{_before(metric, point)}{equal}", 2)
        yield hanging(_reason(two), 2)


def _values(point: Point) -> str:
    if point.distance == math.inf:
        return "is not a number in " + " and ".join(
            letter for letter, value in (("A", point.a), ("B", point.b)) if math.isnan(value)
        )
    texts = [f"{value:.6g}" for value in (point.a, point.b)]
    texts = texts if texts[0] != texts[1] else [repr(point.a), repr(point.b)]
    return f"{' and '.join(texts)}, {point.distance:.1e} apart"


def _before(metric: Metric, point: Point) -> str:
    """Return what came before the record at which the runs part: a jump is an error or another recipe, where rounding
    grows slowly."""
    before = [p for p in metric.points if p.step < point.step]
    if not before:
        return ""
    far = max(p.distance for p in before)
    largest = f"; before it at most {far:.1e}" if far else ""
    first, last = before[-1].step + 1, point.step - 1
    if first > last or metric.name != "step_loss":
        return largest
    return f"{largest}; {f'steps {first} to {last} have' if first < last else f'step {first} has'} no record in common"


def _reason(two: TwoRuns) -> str:
    groups = two.groups.values()
    states = {
        "different": [g.title for g in groups if g.differing],
        "the same": [g.title for g in groups if g.is_equal],
        "not recorded by both": [g.title for g in groups if g.without and not g.differing],
    }
    reason = "; ".join(f"{state}: {', '.join(titles)}" for state, titles in states.items() if titles)
    decided = two.groups["recipe"].is_equal and two.groups["data"].is_equal
    if decided and any(field.name == "plan" for field in two.groups["execution"].differing):
        reason += ". dtgpt compare RECIPE.py --plans NAME compares gradients, parameter by parameter"
    return reason
