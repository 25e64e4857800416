"""Loss curves: as a PNG, and as a line of text. matplotlib (extra `plot`) is imported only here."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dtgpt.run.folder import EXAMPLE
from dtgpt.run.records import read_records
from dtgpt.util.errors import UserError
from dtgpt.util.shared.output_files import cannot_write, check_can_write
from dtgpt.util.storage import atomic_file, did_you_mean

CURVES = (("loss", "training", "-"), ("validation_loss", "validation", "o--"))  # metric, name and style
MOST_TASKS = 12  # whose figures are drawn
LARGEST_SHOWN = 1e30  # larger values are not drawn, nor do they overflow a sum
LEAST_RANGE = 0.02  # of a sparkline


def plot_runs(runs: list[Path], output: Path) -> None:
    """Draw training and validation loss of each run folder over its steps into `output` (.png), and below them the main
    figure of each task that a run has measured. Raises UserError if a run has no losses, or `output` cannot be
    written."""
    check_picture(output)
    pyplot = import_pyplot()
    records = {run: read_records(run / "metrics.jsonl") for run in runs}
    for run, own in records.items():
        if not run.exists():
            raise UserError(f"{run} does not exist; {did_you_mean(run, EXAMPLE)}")
        if not any(_drawable(record, name) for record in own for name, _, _ in CURVES):
            raise UserError(f"{run} has no losses to draw; {EXAMPLE}")
    figures = sorted({name for own in records.values() for record in own for name in main_figures(record)})[:MOST_TASKS]
    ratios = [2] + [1] * len(figures)
    options = {"squeeze": False, "sharex": True, "height_ratios": ratios, "figsize": (8, 5 + 2.5 * len(figures))}
    picture, panels = pyplot.subplots(len(ratios), layout="constrained", **options)
    losses, *below = panels[:, 0]
    losses.set(ylabel="loss (nats per token)")
    for panel, name in zip(below, figures, strict=True):
        panel.set(ylabel=plain(name))
    for run, own in records.items():
        label, color = plain(run.name).lstrip("_"), None
        for name, kind, style in CURVES:
            color = _draw(losses, own, name, style, f"{label}, {kind}", color)
        for panel, name in zip(below, figures, strict=True):
            _draw(panel, own, name, "o-", label, color)
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.legend()
    panels[-1, 0].set(xlabel="optimizer step")
    save_picture(picture, output)


def check_picture(output: Path) -> None:
    """Raise UserError where `output` cannot be the name of a picture, or its folder cannot hold it."""
    if output.suffix != ".png" or not output.parent.is_dir() or (os.path.lexists(output) and not output.is_file()):
        raise UserError(f"{output} is not a file name for the picture; use a .png in an existing folder")
    check_can_write(output)


def save_picture(picture: Any, output: Path) -> None:
    """Write a figure of pyplot as PNG and close it. Raises UserError where it cannot be written."""
    try:
        with atomic_file(output) as file:
            picture.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise cannot_write(output, error) from None
    finally:
        import_pyplot().close(picture)


def main_figures(record: dict[str, Any]) -> list[str]:
    """Return the name, such as hellaswag/acc_norm, of the first figure of each task in a record."""
    firsts = {name.partition("/")[0]: name for name in reversed(record) if "/" in name}
    return list(firsts.values())


def _draw(panel: Any, records: list[dict[str, Any]], name: str, style: str, label: str, color: Any) -> Any:
    """Draw the values of a metric, in a color if one is given, and return the color; nothing where there are none."""
    points = [(record["step"], record[name]) for record in records if _drawable(record, name)]
    if not points:
        return color
    (line,) = panel.plot(*zip(*points, strict=True), style, color=color, markersize=4)
    line.set_label(label)
    return line.get_color()


def _drawable(record: dict[str, Any], name: str) -> bool:
    """Return whether a record has a value of this name that an axis can hold: those of matplotlib overflow near the
    limit of a float."""
    value = record.get(name)
    return value is not None and abs(value) < LARGEST_SHOWN


def plain(text: str) -> str:
    """Return a text that matplotlib shows as it is, where it would take a pair of $ for mathematics."""
    return text.replace("$", r"\$")


def import_pyplot() -> Any:
    """Return matplotlib.pyplot without a display. Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a loss plot needs the package matplotlib; run pip install 'dtgpt[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """Return a curve in one line of text, `width` characters at most, each the mean of its part of the values. The
    height is the range of the values, and at least `LEAST_RANGE` of the largest: noise shall not look like a rise."""
    known = [v for v in values if v is not None and abs(v) < LARGEST_SHOWN]
    if not known:
        return ""
    width = min(width, len(known))
    cuts = [round(i * len(known) / width) for i in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    height = max(high - low, LEAST_RANGE * max(abs(low), abs(high)))
    return "".join("▁▂▃▄▅▆▇█"[round((m - low) / height * 7) if height else 0] for m in means)
