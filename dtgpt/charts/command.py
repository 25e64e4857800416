"""`dtgpt plot`: the loss curves of runs as one picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dtgpt.commands.command import Command
from dtgpt.util.console import say


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw the training and validation losses of one or more run folders into one picture."""

    output: Annotated[str, "PNG file to write"] = "loss.png"


def plot(*runs: Path, options: PlotOptions) -> None:
    from dtgpt.charts.plot import plot_runs

    plot_runs(list(runs), Path(options.output))
    say(options.output)


command = Command("plot RUN ...", PlotOptions, plot, "runs/gpt2_tiny-001 runs/gpt2_tiny-002")
