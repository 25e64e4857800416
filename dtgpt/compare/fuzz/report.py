"""What is said of random cases: a line of each, and a table of all."""

from collections import Counter
from collections.abc import Sequence

from dtgpt.compare.fuzz.case import Case
from dtgpt.compare.fuzz.judge import Figures, Outcome
from dtgpt.config.plan import SCHEDULES
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError


def line(index: int, outcome: Outcome) -> str:
    """Return the progress line of a case."""
    case, figures = outcome.case, outcome.figures
    own = [word for word, there in (("cut", case.blocks_per_stage), ("table", case.table)) if there]
    plans = f"{case.first.plan} > {case.plan}" if case.first else case.plan
    name = " ".join([case.architecture, plans, *own, case.values.get("precision", "")])
    said = outcome.sentence
    if outcome.verdict == "right" and figures is not None:
        gradients = f"gradients {figures.first_gradient:.0e} and {figures.last_gradient:.0e}"
        said = "; ".join(filter(None, (f"loss {figures.loss:.0e}, {gradients}, weight {figures.weight:.0e}", said)))
    return f"{index:>4} {outcome.verdict:<8}{name}: {said}"


def kinds(case: Case) -> list[str]:
    """Return the kinds of plan and training that a case belongs to."""
    plan = case.parallel_plan()
    found = [case.architecture, str(case.values.get("precision", "fp32"))]
    if plan.world == 1:
        found.append("one process")
    if (plan.dp or 1) > 1:
        found.append(f"dp zero{plan.zero}")
    if plan.cp > 1:
        found.append(f"cp zero{plan.zero}")
        groups = case.values.get("model.num_kv_heads", case.values["model.num_heads"])
        found += ["cp, same heads"] * (groups % (plan.cp * plan.tp) > 0)
    if plan.ep > 1:
        found.append("ep")
    if plan.tp > 1:
        found.append("tp sp" if plan.sequence_parallel else "tp")
    if plan.pp > 1:
        found.append(f"pp {next(word for word, name in SCHEDULES.items() if name == plan.schedule)}")
    found += ["own cut"] * bool(case.blocks_per_stage) + ["own table"] * bool(case.table)
    found += ["two plans"] * bool(case.first) + ["token files"] * case.prepared
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Return counts and largest differences by kind. A case belongs to several kinds; those in 16 bits have rows of
    their own, since their rounding hides that of the others."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    bad = sum(outcome.is_bad for outcome in outcomes)
    lines = [
        "",
        f"{'largest relative differences':<29}{'cases':>6}{'refused':>8}{'empty':>6}{'wrong':>6}"
        f"{'loss':>9}{'grad 1':>9}{'grad N':>9}{'weight':>9}{'validation':>12}",
    ]
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        narrow = outcome.case.values.get("precision", "fp32") != "fp32"
        try:
            names = kinds(outcome.case)
        except UserError:
            names = ["other"]
        for name in names[1:2] if narrow else names:
            rows.setdefault(name, []).append(outcome)
    for name, some in sorted(rows.items()):
        refused, empty = (sum(o.verdict == verdict for o in some) for verdict in ("refused", "empty"))
        wrong = sum(o.is_bad for o in some)
        largest = _largest([o.figures for o in some if o.figures])
        lines.append(f"{name:<29}{len(some):>6}{refused:>8}{empty:>6}{wrong:>6}{largest}")
    others = f"{verdicts['refused']} refused, {verdicts['empty']} with nothing to compare, {bad} wrong"
    lines += ["", f"{counted(verdicts['right'], 'case')} right, {others}"]
    return "\n".join(lines)


def _largest(figures: Sequence[Figures]) -> str:
    """Return a column for each figure: the largest of each difference, or dashes where nothing was compared."""
    cells = [f"{max(values):.0e}" for values in zip(*figures, strict=True)] or ["-"] * len(Figures._fields)
    return "".join(cell.rjust(width) for cell, width in zip(cells, (9, 9, 9, 9, 12), strict=True))
