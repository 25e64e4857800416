"""What `dtgpt compare RUN_A RUN_B` prints."""

import math
import shutil
from collections.abc import Iterator

from dtgpt.run.fact_differences import Field, Group, code_changes
from dtgpt.run.facts import Run
from dtgpt.run.text_plot import plot_distances, plot_losses
from dtgpt.run.two_curves import Metric, Point
from dtgpt.run.two_runs import GIVEN, TwoRuns
from dtgpt.util.console import counted, hanging
from dtgpt.util.errors import shown_name

WIDEST = 100  # columns of a plot
MOST_FIELDS = 40  # of a group that are listed
MOST_METRICS = 30  # that are listed, losses first
MOST_FILES = 6  # of dtgpt's source that are named
EXPLANATIONS = {
    "recipe": "what decides the curve", "data": "the tokens and their order", "code": "dtgpt's source files",
    "execution": "which changes rounding alone", "versions": "of the last start",
    "other": "which does not change the curve",
}  # fmt: skip


def report(two: TwoRuns) -> str:
    """Return the curves, their distances, the fields that differ and, last, the verdict."""
    parts = [_heads(two), _curves(two), _table(two), _differences(two), verdict(two)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


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
    yield from _what_is_compared(two)


def _extent(run: Run) -> str:
    """Return `steps 1 to 60 of 100, log.interval 5; it ended early or is still being trained`."""
    curve = run.curves.losses() or run.curves.of["validation_loss"]
    steps = f"steps {next(iter(curve))} to {run.curves.last}"
    interval = "" if run.interval is None else f", log.interval {run.interval}"
    if run.steps is None:
        return steps + interval
    early = "; it ended early or is still being trained" if run.curves.last < run.steps else ""
    return f"{steps} of {run.steps}{interval}{early}"


def _what_is_compared(two: TwoRuns) -> Iterator[str]:
    """Yield notes on what of the runs can be compared."""
    runs, steps = (two.a, two.b), two.steps
    recorded = [{step for m in two.deciding for step in run.curves.of[m.name]} for run in runs]
    if any(set(steps) != own for own in recorded):
        counts = " and ".join(f"{len(own):,}" for own in recorded)
        yield hanging(f"   compared: the {counted(len(steps), 'common step')} of {counts} with a recorded loss", 5)
    if two.a.curves.last != two.b.curves.last:
        letter, shorter = ("A", two.a) if two.a.curves.last < two.b.curves.last else ("B", two.b)
        yield f"   {letter} ends at step {shorter.curves.last}: what the other run recorded later is not compared"
    if (seen := two.seen()) is not None:
        name, step, a, b = seen
        yield f"   {name} seen differ from step {step} on: {a:,.0f} and {b:,.0f}: equal steps are not equal {name}"


def _curves(two: TwoRuns) -> Iterator[str]:
    width = min(WIDEST, shutil.get_terminal_size().columns)
    curves = [run.curves.losses() or run.curves.of["validation_loss"] for run in (two.a, two.b)]
    if lines := plot_losses([list(curve.items()) for curve in curves], width):
        yield "loss (nats per token): o A, x B, * both"
        yield from lines
    metric = two.parting[0] if two.parting else two.deciding[0]
    if lines := plot_distances([(point.step, point.distance) for point in metric.points], width):
        yield ""
        yield f"{metric.title}, |A - B| / max(|A|, |B|)"
        yield from lines


def _table(two: TwoRuns) -> Iterator[str]:
    shown = two.metrics[:MOST_METRICS]
    width = max(len(_title(metric)) for metric in shown)
    yield f"{'':<{width}}    steps  equal to step   largest   at step"
    for metric in shown:
        equal = "none" if metric.equal_until is None else "all" if metric.is_equal else str(metric.equal_until)
        far = "nan" if metric.largest.distance == math.inf else f"{metric.largest.distance:.1e}"
        last = f"{'0':>8}" if metric.is_equal else f"{far:>8}{metric.largest.step:>10}"
        yield f"{_title(metric):<{width}}{len(metric.points):>9}{equal:>15}  {last}".rstrip()
    if len(two.metrics) > MOST_METRICS:
        yield f"and {len(two.metrics) - MOST_METRICS} more"


def _title(metric: Metric) -> str:
    return shown_name(metric.title)


def _differences(two: TwoRuns) -> Iterator[str]:
    """Yield the fields in which the runs differ, by group."""
    for group in two.groups.values():
        yield from _group_lines(group, two)


def _group_lines(group: Group, two: TwoRuns) -> Iterator[str]:
    state = "the same" if group.is_equal else "differs" if group.fields else f"not recorded by {group.without}"
    yield f"{group.title:<10} {state}  ({EXPLANATIONS[group.title]})"
    if group.title == "code" and group.fields and (files := code_changes(two.a, two.b)):
        more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
        yield hanging(f"  in {', '.join(map(shown_name, files[:MOST_FILES]))}{more}", 4)
    listed = not group.without or group.title == "code"  # of a run without a recipe, each field is missing
    yield from _field_lines(group.fields + group.missing * listed)


def _field_lines(fields: list[Field]) -> Iterator[str]:
    width = shutil.get_terminal_size().columns
    names = max((len(field.name) for field in fields), default=0)
    values = max((len(field.a) for field in fields), default=0)
    for name, a, b in fields[:MOST_FIELDS]:
        line = f"  {shown_name(name):<{names}}  A {a:<{values}}  B {b}"
        if len(line) <= width:
            yield line
        else:
            yield f"  {shown_name(name)}"
            yield hanging(f"    A {a}", 6)
            yield hanging(f"    B {b}", 6)
    if len(fields) > MOST_FIELDS:
        yield f"  and {len(fields) - MOST_FIELDS} more"


def verdict(two: TwoRuns) -> Iterator[str]:
    """Yield whether the curves are equal, within rounding or part, and why that may be."""
    limit = f"the tolerance of {two.tolerance.value:g} ({two.tolerance.source})"
    steps = f"{counted(len(two.steps), 'common step')}, {two.steps[0]} to {two.steps[-1]}"
    equal = "" if two.equal_until is None else f"; equal bit for bit up to step {two.equal_until}"
    if two.is_equal:
        yield hanging(f"equal bit for bit: all losses of {steps}", 2)
        return
    parting = two.parting
    if parting is None:
        metric = max(two.deciding, key=lambda metric: metric.largest.distance)
        worst = metric.largest
        far = f"at most {worst.distance:.1e} ({_title(metric)}, step {worst.step})"
        what = "tolerance" if two.tolerance.source == GIVEN else "rounding"
        yield hanging(f"equal within {what}: {far}, not above {limit}, at {steps}{equal}", 2)
        return
    yield hanging(f"part at step {_parting(*parting)}, the first record above {limit}{_before(*parting)}{equal}", 2)
    yield hanging(_reason(two), 2)


def _parting(metric: Metric, point: Point) -> str:
    if point.distance == math.inf:
        which = [letter for letter, value in (("A", point.a), ("B", point.b)) if math.isnan(value)]
        return f"{point.step}: {_title(metric)} is not a number in {' and '.join(which)}"
    return f"{point.step}: {_title(metric)} {_pair(point)}, {point.distance:.1e} apart"


def _pair(point: Point) -> str:
    texts = [f"{value:.6g}" for value in (point.a, point.b)]
    return " and ".join(texts if texts[0] != texts[1] else map(repr, (point.a, point.b)))


def _before(metric: Metric, point: Point) -> str:
    """Return what came before the record at which the runs part: a jump is an error or another recipe, where rounding
    grows slowly."""
    before = metric.before(point.step)
    if before is None:
        return ""
    largest = f"; before it at most {before.distance:.1e}" if before.distance else ""
    former = max(p.step for p in metric.points if p.step < point.step)
    first, last = former + 1, point.step - 1
    if first > last or metric.name != "step_loss":
        return largest
    return f"{largest}; {f'steps {first} to {last} have' if first < last else f'step {first} has'} no record in common"


def _reason(two: TwoRuns) -> str:
    groups = [two.groups[title] for title in ("recipe", "data", "code", "execution", "versions")]
    names = {"different": [g for g in groups if g.fields], "the same": [g for g in groups if g.is_equal]}
    names["not recorded by both"] = [g for g in groups if g.without and not g.fields]
    told = "; ".join(f"{state}: {', '.join(g.title for g in found)}" for state, found in names.items() if found)
    if not two.groups["recipe"].is_equal or not two.groups["data"].is_equal:
        return told
    plans = [field for field in two.groups["execution"].fields if field.name == "plan"]
    advice = "dtgpt compare RECIPE.py --plans NAME compares gradients, parameter by parameter"
    return f"{told}. {advice}" if plans else told
