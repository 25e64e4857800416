"""What a run has recorded: its curves, and recipe, data, code and machine of its last start."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.manifest import STATE
from dtgpt.compare.starts import STARTS, flat, read_starts
from dtgpt.run.folder import EXAMPLE
from dtgpt.run.records import metric_lines, parse_record
from dtgpt.run.saved_recipe import read_recipe
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError
from dtgpt.util.storage import did_you_mean

TRAINING = ("step_loss", "loss")  # of the step alone, and the mean since the last multiple of log.interval
HELD_OUT = ("validation_loss", "test_loss")
OTHERS = ("grad_norm", "lr", "samples", "tokens")
SHOWN_DIGEST = 12  # digits of the digest of data, as many as those of code have
Curve = dict[int, float]  # value by step, in the order of steps; NaN where no number was recorded


@dataclass
class Curves:
    """What a run has measured, by the name of the metric."""

    of: dict[str, Curve] = field(default_factory=dict)
    unread: int = 0  # lines that hold no record
    dropped: int = 0  # records of steps that were taken again later

    @property
    def losses(self) -> Curve:
        """The training loss of the steps, else the mean losses, else the validation loss; empty without any."""
        return next((self.of[name] for name in (*TRAINING, "validation_loss") if self.of.get(name)), {})

    @property
    def last(self) -> int:
        """The last step with a training loss, or else with any record; 0 where there is none."""
        return self._end(TRAINING) or self._end(self.of)

    def add(self, record: dict[str, Any]) -> None:
        """Take a record. Where a training loss is of an earlier step than the one before it, the run had gone on from
        there: what came later is of another history."""
        step = record["step"]
        if any(name in record for name in TRAINING) and step < self._end(TRAINING):
            self.dropped += max(_cut(curve, step) for curve in self.of.values())
        for name, value in record.items():
            if name in TRAINING + HELD_OUT + OTHERS or "/" in name:  # which the figures of tasks have
                curve = self.of.setdefault(name, {})
                _cut(curve, step)  # also a value of the same step, which was written twice
                curve[step] = math.nan if value is None else float(value)

    def _end(self, names: Iterable[str]) -> int:
        return max((next(reversed(self.of[name])) for name in names if self.of.get(name)), default=0)


def read_curves(path: Path) -> Curves:
    """Return the curves of a metrics.jsonl; empty if the file does not exist."""
    curves = Curves()
    for line in metric_lines(path):
        record = parse_record(line)
        if record is None:
            curves.unread += bool(line.strip())
        else:
            curves.add(record)
    return curves


def _cut(curve: Curve, step: int) -> int:
    """Remove the values of `step` and of later ones, and return how many there were."""
    removed = 0
    while curve and next(reversed(curve)) >= step:
        curve.popitem()
        removed += 1
    return removed


@dataclass
class Run:
    """A run folder, or a metrics.jsonl alone."""

    path: Path
    metrics: Path
    curves: Curves
    recipe: dict[str, Any] = field(default_factory=dict)  # of the last start, flat; empty where it is not recorded
    starts: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int | None:
        """The number of steps that the run was to take, None where that is not recorded."""
        steps = self.recipe.get("steps")
        return steps if type(steps) is int and steps > 0 else None

    @property
    def interval(self) -> int | None:
        """`log.interval`, None where it is not recorded or a resume changed it."""
        interval = self.recipe.get("log.interval")
        changed = any("log.interval" in _group(start, "before") for start in self.starts)
        return interval if type(interval) is int and interval > 0 and not changed else None

    @property
    def start(self) -> dict[str, Any]:
        """What the last start has recorded; empty of an older version."""
        last = self.starts[-1] if self.starts else {}
        digest = last.get("data")
        return last | {"data": digest[:SHOWN_DIGEST]} if isinstance(digest, str) else last


def _group(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in values from JSON; an empty one where there is none."""
    group = values.get(name)
    return group if isinstance(group, dict) else {}


def open_run_or_metrics(path: Path) -> Run:
    """Return the run at `path`, a run folder or a metrics.jsonl. Raise UserError for anything else, and for a run
    without a loss."""
    folder, metrics = _places(path)
    run = Run(path, metrics, read_curves(metrics))
    if not run.curves.losses:
        unread = run.curves.unread
        has = f"{counted(unread, 'line')} that hold no record" if unread else "no losses yet"
        raise UserError(f"{path} has {has}, so that there is nothing to compare; {EXAMPLE}")
    if folder is not None:
        try:
            run.recipe = flat(read_recipe(folder))
        except UserError as error:
            run.problems.append(str(error).partition(";")[0])
        run.starts = read_starts(folder)
        # A run that goes on has no `init_from` any more. What it began with is what its first start had.
        for start in reversed(run.starts):
            run.recipe |= {name: value for name, value in _group(start, "before").items() if name == "init_from"}
        if run.starts[1:]:
            steps = ", ".join(str(start["step"]) for start in run.starts[1:])
            run.problems.append(f"its last start is compared; it went on after step {steps} ({STARTS})")
    return run


def _places(path: Path) -> tuple[Path | None, Path]:
    """Return the run folder, None where there is none, and its metrics.jsonl."""
    if path.is_dir():
        if (path / "metrics.jsonl").is_file() or (path / "recipe.json").is_file():
            return path, path / "metrics.jsonl"
        if (path / STATE).is_file():
            raise UserError(f"{path} is a checkpoint; give its run, {path.absolute().parents[1]}")
        if names := sorted(p.parent.name for p in path.glob("*/metrics.jsonl")):
            raise UserError(f"{path} holds {len(names)} run folders; give two of them, such as {path / names[0]}")
        raise UserError(f"{path} is not a run folder (it has no metrics.jsonl); {EXAMPLE}")
    if path.suffix == ".py":
        raise UserError(
            f"{path} is a recipe, which dtgpt compare takes alone, with --plans; to compare two runs, {EXAMPLE}"
        )
    if path.is_file():
        is_in_run = path.name == "metrics.jsonl" and (path.parent / "recipe.json").is_file()
        return path.parent if is_in_run else None, path
    if path.exists():
        raise UserError(f"{path} is neither a folder nor a file; {EXAMPLE}")
    raise UserError(f"{path} does not exist; {did_you_mean(path, EXAMPLE)}")
