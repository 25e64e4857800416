"""The tables and the picture of docs/correctness.md, from the results of correctness.py."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from dtgpt.charts.plot import import_pyplot

PICTURE = {"single": "one process", "dp2": "dp2", "dp2_zero3": "zero3", "tp2_sp": "tp2_sp", "pp2": "pp2"}
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")  # of Okabe and Ito: told apart by the colour-blind
WIDTHS = (8.0, 6.0, 4.2, 2.6, 1.2)  # a thinner line on a thicker one, so that all of them are seen
SHORT = 20  # steps of the table in fp32
HEIGHTS = {"fp32": 4e-7, "bf16": 3e-3}  # of the labels, above the curves
FIGURES = ("loss", "first_gradient", "last_gradient", "weight", "travel")
HEAD = ("plan", "model", "precision", "steps", "captured", "recompute", "loss", "first gradient", "last gradient",
        "weight", "of the way", "command")  # fmt: skip
SUMMARY = ("precision", "runs", *HEAD[6:11])
Result = dict[str, Any]


def table(results: list[Result]) -> str:
    """Return the rows of the table in Markdown. Modes of a plan (captured or not, recomputed or not) that ended with
    the same losses and weights, bit for bit, share a row."""
    rows: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda r: (r["precision"] != "fp32", r["family"])):
        if is_row(result):
            rows[result["precision"], result["family"], result["label"], result["plan"]].append(result)
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for same in rows.values():
        lines += [f"| {' | '.join(row)} |" for row in merged(same)]
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """Return the rows of docs/correctness.md: for each precision the largest figures of all plans and models, and those
    of one process that rounds in another way."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda r: (r["precision"] != "fp32", r["label"])):
        if is_row(result) and result["label"] != "one process":
            groups[result["precision"], result["label"]].append(result)
    lines = [f"| {' | '.join(SUMMARY)} |", "|---" * len(SUMMARY) + "|"]
    for (precision, label), some in groups.items():
        runs = label or f"{len({result['plan'] for result in some})} plans"
        cells = [precision, runs, *(short(max(r.get(key, math.inf) for r in some)) for key in FIGURES)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "")


def is_row(result: Result) -> bool:
    """Return whether a result stands in the table: neither a reference nor one that is there for the picture."""
    reference = result["plan"] == "single" and not result["label"]
    return not reference and (result["precision"] == "fp32") == (result["steps"] <= SHORT)


def merged(results: list[Result]) -> list[list[str]]:
    """Return the rows of one plan, model and precision."""
    rows = []
    by_bits: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        by_bits[result.get("digest") or result["problem"]][result["graph"]].append(result)
    for graphs in by_bits.values():
        by_recompute: dict[tuple[str, ...], list[Result]] = defaultdict(list)
        for some in graphs.values():
            by_recompute[tuple(sorted(result["recompute"] for result in some))] += some
        rows += [row(some) for some in by_recompute.values()]
    return rows


def row(same: list[Result]) -> list[str]:
    first = same[0]
    captured = words({result["graph"] for result in same}, {"auto": "-" if on_cpu(first) else "yes", "off": "no"})
    recompute = words({result["recompute"] for result in same}, {"none": "none", "full": "full"})
    plan = first["label"] or f"`{first['plan']}`"
    found = [first["problem"], *[""] * 4] if "problem" in first else [short(first[key]) for key in FIGURES]
    known = [plan, first["family"], first["precision"], str(first["steps"]), captured, recompute]
    return [*known, *found, command(first)]


def words(values: set[str], names: dict[str, str]) -> str:
    return "/".join(name for value, name in names.items() if value in values)


def command(case: Result) -> str:
    """Return the command that repeats a case; `$gpt2` and `$llama` are recipes with options."""
    if case["plan"] == "single":
        return "`python benchmarks/correctness.py`, as all rows"
    options = f"--precision {case['precision']}"
    options += " --graph off" if case["graph"] == "off" else ""
    options += f" --recompute {case['recompute']}" if case["recompute"] != "none" else ""
    return f"`dtgpt compare ${case['family']} --plans {case['plan']} --steps {case['steps']} {options}`"


def on_cpu(result: Result) -> bool:
    return str(result.get("device", "")).startswith("CPU")


def draw(results: list[Result], output: Path) -> None:
    """Draw the losses of five plans, and beside them how far they are from those of one process, in each precision that
    was measured."""
    from PIL import Image  # which the measurement does without

    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.0), layout="constrained")
    curves = {precision: found for precision in ("fp32", "bf16") if (found := losses(results, precision))}
    shown = next(iter(curves))
    for (plan, curve), color, width in zip(curves[shown].items(), COLORS, WIDTHS, strict=True):
        left.plot(range(1, len(curve) + 1), curve, linewidth=width, color=color, label=PICTURE[plan])
    for of_plans in curves.values():
        for (plan, curve), color in zip(of_plans.items(), COLORS, strict=True):
            if plan != "single":
                difference(right, curve, of_plans["single"], ".", color)
    if len(curves) > 1:
        difference(right, curves["bf16"]["single"], curves["fp32"]["single"], "-", "#9AA4B2")
        right.text(
            0.98, 2e-2, "line: bf16 from fp32, on one process", transform=right.get_yaxis_transform(), ha="right"
        )
    for precision in curves:
        right.text(0.98, HEIGHTS[precision], precision, transform=right.get_yaxis_transform(), ha="right")
    left.set(xlabel="optimizer step", ylabel="training loss (nats per token)", title=f"five plans, one curve ({shown})")
    left.legend(frameon=False)
    right.set(xlabel="optimizer step", ylabel="relative difference of the loss", yscale="log", ylim=(1e-8, 1e-1),
              title="differences from one process")  # fmt: skip
    for panel in (left, right):
        panel.grid(alpha=0.25, axis="y")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)
    Image.open(output).convert("RGB").quantize(64).save(output, optimize=True)  # a third of the bytes


def losses(results: list[Result], precision: str) -> dict[str, list[float]]:
    """Return the losses of the plans of the picture: those of GPT-2 over the most steps; nothing where one of them was
    not measured."""
    some = [r for r in results if (r["family"], r["precision"], r["recompute"]) == ("gpt2", precision, "none")]
    most = max(result["steps"] for result in some)
    found: dict[str, list[float]] = {}
    for plan in PICTURE:
        of_plan = [r for r in some if r["plan"] == plan and r["steps"] == most and not r["label"] and "losses" in r]
        if not of_plan or (precision == "fp32" and most <= SHORT):
            return {}
        found[plan] = of_plan[0]["losses"]
    return found


def difference(axes: Any, curve: list[float], reference: list[float], style: str, color: str) -> None:
    apart = [abs(a - b) / b or None for a, b in zip(curve, reference, strict=True)]  # 0 has no place on a log axis
    axes.plot(range(1, len(apart) + 1), apart, style, markersize=3, linewidth=1, color=color)
