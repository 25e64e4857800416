"""Loss curves as a PNG. matplotlib (extra `plot`) is imported only here."""

from pathlib import Path
from typing import Any

from dtgpt.run.sinks import read_records
from dtgpt.util.errors import UserError
from dtgpt.util.storage import atomic_file


def plot_runs(runs: list[Path], output: Path) -> None:
    """Draw training and held-out loss of each run folder over its steps into `output` (.png). Raises UserError if a run
    has no losses, or `output` cannot be written."""
    if output.suffix != ".png" or not output.parent.is_dir() or (output.exists() and not output.is_file()):
        raise UserError(f"{output} is not a file name for the picture; use a .png in an existing folder")
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        records = read_records(run / "metrics.jsonl")
        color, label = None, run.name.replace("$", r"\$").lstrip("_")
        if not any("loss" in r or "valid_loss" in r for r in records):
            pyplot.close(figure)
            raise UserError(f"{run} has no losses to draw; give run folders such as runs/gpt2_tiny-001")
        for name, kind, style in (("loss", "training", "-"), ("valid_loss", "held out", "o--")):
            points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
            if points:
                (line,) = axes.plot(*zip(*points, strict=True), style, color=color, markersize=4)
                line.set_label(f"{label}, {kind}")
                color = line.get_color()
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        with atomic_file(output) as file:
            figure.savefig(file, format="png", dpi=120)
    finally:
        pyplot.close(figure)


def import_pyplot() -> Any:
    """Return matplotlib.pyplot without a display. Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a loss plot needs the package matplotlib; run pip install 'dtgpt[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
