"""The curves of a run, read from its metrics.jsonl."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtgpt.run.sinks import metric_lines, parse_record

TRAINING = ("step_loss", "loss")  # of the step alone, and the mean since the last multiple of log.interval
HELD_OUT = ("valid_loss", "test_loss")
OTHERS = ("grad_norm", "lr", "samples", "tokens")
Curve = dict[int, float]  # value by step, in the order of steps; NaN where no number was recorded


@dataclass
class Curves:
    """What a run has measured, by the name of the metric."""

    of: dict[str, Curve] = field(default_factory=dict)
    unread: int = 0  # lines that hold no record
    dropped: int = 0  # records of steps that were taken again later

    @property
    def last(self) -> int:
        """The last step with a training loss, or else with any record; 0 where there is none."""
        return _end(self.of, TRAINING) or _end(self.of, self.of)

    def losses(self) -> Curve:
        """Return the training loss of the steps, or else the mean losses; empty where none was recorded."""
        return self.of.get("step_loss") or self.of.get("loss") or {}

    def add(self, record: dict[str, Any]) -> None:
        """Take a record. Where a training loss is of an earlier step than the one before it, the run had gone on from
        there: what came later is of another history."""
        step = record["step"]
        if any(name in record for name in TRAINING) and step < _end(self.of, TRAINING):
            self.dropped += max(_cut(curve, step) for curve in self.of.values())
        for name, value in record.items():
            if name in TRAINING + HELD_OUT + OTHERS or "/" in name:  # which the figures of tasks have
                curve = self.of.setdefault(name, {})
                _cut(curve, step)  # also a value of the same step, which was written twice
                curve[step] = math.nan if value is None else float(value)


def read_curves(path: Path) -> Curves:
    """Return the curves of a metrics.jsonl; none where there is no such file."""
    curves = Curves()
    for line in metric_lines(path):
        record = parse_record(line)
        if record is None:
            curves.unread += bool(line.strip())
        else:
            curves.add(record)
    return curves


def _end(curves: dict[str, Curve], names: Iterable[str]) -> int:
    """Return the last step of the curves with these names, 0 where there is none."""
    return max((next(reversed(curves[name])) for name in names if curves.get(name)), default=0)


def _cut(curve: Curve, step: int) -> int:
    """Remove the values of `step` and of later ones, and return how many there were."""
    removed = 0
    while curve and next(reversed(curve)) >= step:
        curve.popitem()
        removed += 1
    return removed
