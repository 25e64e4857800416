"""The loss curves of two runs and how far they are apart, as a PNG."""

import math
from pathlib import Path
from typing import Any

from dtgpt.charts.plot import LARGEST_SHOWN, import_pyplot, plain, save_picture
from dtgpt.compare.two_runs import TwoRuns

STYLES = {"step_loss": "training", "loss": "training", "validation_loss": "validation", "test_loss": "test"}
LEAST = 1e-17  # below the distance of any two floats
LINES = {"training": "-", "validation": "o--", "test": "s"}


def plot_two_runs(two: TwoRuns, output: Path) -> None:
    """Draw training, validation and test losses of both runs over their steps into `output` (.png), and below them, on
    a log axis, how far they are apart, with the tolerance. Raises UserError if matplotlib is not installed."""
    pyplot = import_pyplot()
    options = {"sharex": True, "height_ratios": [3, 2], "figsize": (8, 7), "layout": "constrained"}
    picture, (losses, distances) = pyplot.subplots(2, **options)
    names = [plain(str(run.path)) for run in (two.a, two.b)]
    for run, letter, name, color, width in zip((two.a, two.b), "AB", names, ("C0", "C1"), (3, 1.2), strict=True):
        training = "step_loss" if run.curves.of.get("step_loss") else "loss"
        for loss in (training, "validation_loss", "test_loss"):
            curve, kind = run.curves.of.get(loss, {}), STYLES[loss]
            if points := [(step, value) for step, value in curve.items() if abs(value) < LARGEST_SHOWN]:
                style = {"color": color, "lw": width, "ms": 4, "label": f"{letter} {name}, {kind}"}
                losses.plot(*zip(*points, strict=True), LINES[kind], **style)
    losses.set(ylabel="loss (nats per token)")
    distances.set(yscale="log", ylabel="|A - B| / max(|A|, |B|)", xlabel="optimizer step", autoscaley_on=False)
    heights = [two.tolerance.value] * (two.tolerance.value > 0)
    for number, metric in enumerate(two.deciding):
        points = [(p.step, p.distance) for p in metric.points if 0 < p.distance < math.inf]
        heights += [height for _, height in points]
        line: Any = zip(*points, strict=True) if points else ((), ())
        label = f"{metric.title}: equal bit for bit" if metric.is_equal else metric.title
        distances.plot(*line, "o-", ms=3, color=f"C{number + 2}", label=label)
    if two.tolerance.value > 0:
        distances.axhline(two.tolerance.value, color="gray", ls=":", label=f"tolerance {two.tolerance.value:g}")
    if two.parting is not None:
        for panel in (losses, distances):
            panel.axvline(two.parting[1].step, color="red", lw=0.8, label=f"part at step {two.parting[1].step}")
    if heights:
        distances.set_ylim(max(min(heights), LEAST) / 3, max(heights) * 3)
    for panel in (losses, distances):
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    save_picture(picture, output)
