"""The losses that every run draws when it ends: as a picture, for which matplotlib is imported then, and as a line."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dtgpt.charts.plot import plot_runs, sparkline
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun, Sink, read_records
from dtgpt.train.observer import Observer, Turn
from dtgpt.util.console import say

if TYPE_CHECKING:
    from dtgpt.train.unfinished.left import Past


class LossPlot(Observer):
    """Draw the losses when a run ends. Every run has a `loss.png`, or says why it has none."""

    turn, title = Turn.END, "loss plot"

    def __init__(self, log: LogConfig, steps: int):
        self._steps = steps

    def due(self, step: int) -> bool:
        return step == self._steps

    def left(self, past: "Past") -> bool:
        picture, metrics = past.run / "loss.png", past.run / "metrics.jsonl"
        drawn = picture.is_file() and metrics.is_file() and picture.stat().st_mtime >= metrics.stat().st_mtime
        return bool(past.left or (past.records and not drawn and find_spec("matplotlib")))

    def sink(self, begun: Begun) -> Sink:
        return _Picture(begun.run)


class _Picture(Sink):
    def __init__(self, run: Path):
        self._run = run

    def finish(self) -> None:
        try:
            plot_runs([self._run], self._run / "loss.png")
        except Exception as reason:  # a picture is never worth a run
            say(f"no loss.png: {reason}")
        losses = [record.get("loss") for record in read_records(self._run / "metrics.jsonl")]
        say(f"loss    {sparkline(losses)}")
