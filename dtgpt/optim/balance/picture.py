"""The loads of experts over the steps of a run, drawn when it ends: matplotlib is imported then."""

import re
from pathlib import Path
from typing import Any

from dtgpt.charts.plot import check_picture, import_pyplot, plain, save_picture
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun, Sink, read_records
from dtgpt.train.observer import Observer
from dtgpt.util.console import say

NAME = "experts.png"
PANELS = {  # of the picture: figures of records, of each layer, and the title of the axis
    ("load_max", "load_min"): "load of the fullest and of\nthe emptiest expert (1: even)",
    ("router_entropy",): "entropy of the router (nats)",
    ("dead_experts",): "experts without a token",
}


class LoadPicture(Observer):
    """Draw the loads of a run whose model has experts, when it ends."""

    def sink(self, begun: Begun) -> Sink | None:
        return _Picture(begun.run)


class _Picture(Sink):
    def __init__(self, run: Path):
        self._run = run

    def finish(self) -> None:
        records = read_records(self._run / "metrics.jsonl")
        if not layers_of(records):
            return
        try:
            draw(records, self._run / NAME)
        except Exception as reason:  # a picture is never worth a run
            say(f"no {NAME}: {reason}")


def layers_of(records: list[dict[str, Any]]) -> list[int]:
    """Return the layers of which records have loads."""
    names = {name for record in records for name in record}
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"load_max_(\d+)", name)))


def draw(records: list[dict[str, Any]], output: Path) -> None:
    """Draw the figures of each layer over the steps into `output` (.png). Raises UserError."""
    check_picture(output)
    pyplot, layers = import_pyplot(), layers_of(records)
    picture, panels = pyplot.subplots(len(PANELS), layout="constrained", sharex=True, figsize=(8, 9))
    colours = pyplot.get_cmap("viridis")
    for panel, (figures, title) in zip(panels, PANELS.items(), strict=True):
        panel.set(ylabel=plain(title))
        for figure, style in zip(figures, ("-", ":"), strict=False):
            for place, layer in enumerate(layers):
                name = f"{figure}_{layer}"
                points = [(record["step"], record[name]) for record in records if name in record]
                (line,) = panel.plot(*zip(*points, strict=True), style, color=colours(place / max(1, len(layers) - 1)))
                if style == "-" and place in (0, len(layers) - 1):
                    line.set_label(f"layer {layer}")
        panel.grid(alpha=0.3)
    panels[0].legend()
    panels[-1].set(xlabel="optimizer step")
    save_picture(picture, output)


def load_picture(log: LogConfig, steps: int) -> Observer:
    return LoadPicture()
