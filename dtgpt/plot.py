"""Loss curves as a PNG; matplotlib (extra `plot`) is imported only here."""

from pathlib import Path
from typing import Any

from dtgpt.errors import UserError
from dtgpt.metrics import read_records


def plot_runs(runs: list[Path], output: Path) -> None:
    """Draw training and held-out loss of each run folder over its steps into `output` (.png)."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        records = read_records(run / "metrics.jsonl")
        color = None
        for name, label, style in (("loss", "training", "-"), ("valid_loss", "held out", "o--")):
            points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
            if points:
                (line,) = axes.plot(*zip(*points, strict=True), style, color=color, markersize=4)
                line.set_label(f"{run.name}, {label}")
                color = line.get_color()
    if not axes.lines:
        pyplot.close(figure)
        raise UserError(f"no losses to draw in {', '.join(map(str, runs))}; give run folders with a metrics.jsonl")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = output.with_name(f".{output.name}.partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(output)
    pyplot.close(figure)


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("a loss plot needs the package matplotlib; run pip install 'dtgpt[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
