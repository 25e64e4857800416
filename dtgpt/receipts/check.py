"""What the files of a run say of each other: the chain of receipts, checkpoints, metrics.jsonl and recipe.json.

Nothing of a step is computed: that the lines are those of the run's steps is shown by computing some of them again.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtgpt.checkpoint.manifest import Checkpoint, list_checkpoints, step_of
from dtgpt.checkpoint.shard_file import Damaged, copy_overlap
from dtgpt.compare.starts import flat
from dtgpt.models.config import ModelConfig
from dtgpt.receipts.book import FILE, VERSION, Line, read_lines, read_text
from dtgpt.receipts.digest import Piece, digest
from dtgpt.receipts.state import GRADIENT, WEIGHT, decoded
from dtgpt.run.folder import open_run
from dtgpt.run.records import read_records
from dtgpt.run.saved_recipe import OF_ONE_START, read_recipe
from dtgpt.train.observer import is_due
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

NEAR = 1e-12  # of a mean of losses, which is computed in another order here
NAMED = 3  # of several tensors


class Problem(NamedTuple):
    """Something that the files of a run contradict each other in."""

    kind: str  # "chain", "steps", "checkpoint", "metrics", "recipe"
    step: int | None
    tensor: str | None
    said: str


class Receipts:
    """The receipts of a run, by step. Raises UserError where there are none."""

    def __init__(self, run: Path):
        self.run = open_run(run)
        lines = read_lines(run)
        if not lines:
            raise UserError(f"{run} has no {FILE}; train with --receipts.on, and its steps can be audited")
        self.torn = not read_text(run).endswith(b"\n")
        self.lines = lines[:-1] if self.torn else lines  # a killed process may leave the last one half written
        if not self.lines or not self.lines[0].is_start:
            raise UserError(f"{run / FILE} does not begin with the start of a run; restore the file")
        self.starts = [line.value for line in self.lines if line.is_start]
        if (newest := max(int(start["receipts"]) for start in self.starts)) > VERSION:
            raise UserError(
                f"{run / FILE} was written by a newer dtgpt, in format {newest}; use the dtgpt that wrote it"
            )
        self.steps = {line.step: line for line in self.lines if "step" in line.value}
        self.tables = {line.step: line for line in self.lines if "checkpoint" in line.value}

    def start_of(self, step: int) -> dict[str, Any]:
        """Return the line of the start that took a step."""
        return [start for start in self.starts if start["after"] < step or start is self.starts[0]][-1]

    def labels(self, step: int) -> list[str]:
        """Return the labels of the digests in the line of a step."""
        parts = self.start_of(step)["parts"]
        return parts[step % len(parts)]

    def labels_of_table(self, step: int) -> list[str]:
        """Return the labels of the digests in the line of a checkpoint."""
        parts = self.start_of(step)["parts"]
        return [label for part in parts for label in part if not label.startswith(f"{GRADIENT}/")]


def problems_of(receipts: Receipts, own: type[ModelConfig] | None = None) -> Iterator[Problem]:
    """Yield all that the files of a run contradict each other in. own: class of the model of a recipe."""
    yield from of_chain(receipts)
    yield from of_recipe(receipts)
    yield from of_metrics(receipts)
    for folder in list_checkpoints(receipts.run / "checkpoints"):
        yield from of_checkpoint(receipts, folder, own)


def of_chain(receipts: Receipts) -> Iterator[Problem]:
    """Yield where a line does not follow the one before it, or no step follows the one before it."""
    for line in receipts.lines:
        if line.step < 0:
            yield Problem("chain", None, None, f"line {line.number} of {FILE} holds no receipt")
    for before, line in pairwise(receipts.lines):
        if line.step >= 0 and line.value.get("before") != before.digest:
            said = f"line {line.number} of {FILE} ({told(line)}) does not follow the line before it ({told(before)})"
            yield Problem("chain", line.step, None, f"{said}: one was changed, dropped, put in or exchanged")
    if receipts.lines[0].value.get("before") != "":
        yield Problem("chain", receipts.lines[0].step, None, f"line 1 of {FILE} follows a line that is not there")
    newest = receipts.lines[0].step
    for line in receipts.lines[1:]:
        if "step" in line.value:
            if 0 <= line.step <= newest:
                yield Problem(
                    "steps", line.step, None, f"step {line.step} stands after step {newest}: it was taken twice"
                )
            elif line.step > newest + 1:
                yield Problem("steps", newest + 1, None, f"{span(newest + 1, line.step - 1)} no receipt")
            newest = line.step
        elif line.is_start and line.step > newest:
            yield Problem("steps", newest + 1, None, f"{span(newest + 1, line.step)} no receipt")
            newest = line.step
        elif line.step >= 0 and line.step != newest:
            yield Problem("steps", line.step, None, f"{told(line)} stands after step {newest}")
    runs = {start["run"] for start in receipts.starts}
    if len(runs) > 1:
        yield Problem(
            "chain", None, None, f"{FILE} has lines of {counted(len(runs), 'run')}: {', '.join(sorted(runs))}"
        )


def told(line: Line) -> str:
    """Return what a line tells of, in words."""
    kind = "a start after step" if line.is_start else "checkpoint of step" if "checkpoint" in line.value else "step"
    return f"{kind} {line.step}" if line.step >= 0 else "no receipt"


def span(first: int, last: int) -> str:
    return f"step {first} has" if first == last else f"steps {first} to {last} have"


def of_recipe(receipts: Receipts) -> Iterator[Problem]:
    """Yield the values in which recipe.json differs from the last start's."""
    for name, theirs, ours in changed(receipts.starts[-1]["recipe"], read_recipe(receipts.run)):
        said = f"recipe.json says {name}={ours}, and the receipts {theirs}"
        yield Problem("recipe", receipts.starts[-1]["after"], None, said)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, before, now) of the values of two recipes that differ, but for those of one start."""
    one, other = flat(dict(before)), flat(dict(now))
    names = [name for name in {**one, **other} if name not in OF_ONE_START]
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def of_metrics(receipts: Receipts) -> Iterator[Problem]:
    """Yield the figures of metrics.jsonl that are not those of the receipts."""
    for record in read_records(receipts.run / "metrics.jsonl"):
        line = receipts.steps.get(int(record["step"]))
        for name, own in (("step_loss", "loss"), ("grad_norm", "norm"), ("lr", "lr")):
            if line is not None and record.get(name) is not None and record[name] != line.value[own]:
                yield _other_figure(name, line, record[name], line.value[own])
        if line is not None and record.get("loss") is not None:
            mean = _mean(receipts, line.step)
            if mean is not None and not math.isclose(mean, record["loss"], rel_tol=NEAR):
                yield _other_figure("loss", line, record["loss"], mean)


def _other_figure(name: str, line: Line, there: Any, here: Any) -> Problem:
    said = f"metrics.jsonl says {name}={there!r} at step {line.step}, and the receipts {here!r}"
    return Problem("metrics", line.step, None, said)


def _mean(receipts: Receipts, step: int) -> float | None:
    """Return the mean loss of the steps up to `step` since the last one that `log.interval` divides, as a run records
    it; None where the receipts do not have all of them, or one has no loss."""
    begins = step - 1
    while begins > 0 and not is_due(begins, receipts.start_of(begins)["recipe"]["log"]["interval"]):
        begins -= 1
    lines = [receipts.steps.get(number) for number in range(begins + 1, step + 1)]
    losses: list[Any] = [None if line is None else line.value["loss"] for line in lines]
    if not all(isinstance(loss, float) for loss in losses):
        return None
    return math.fsum(losses) / len(losses)


def of_checkpoint(receipts: Receipts, folder: Path, own: type[ModelConfig] | None) -> Iterator[Problem]:
    """Yield what a checkpoint contradicts the receipts in: its files, its step, its recipe, its tensors."""
    step = step_of(folder)
    line = receipts.tables.get(step)
    if step <= receipts.starts[0]["after"]:
        return
    if line is None:
        yield Problem("checkpoint", step, None, f"no receipt tells of {folder.name}")
        return
    try:
        checkpoint = Checkpoint(folder, own=own)
        damage = checkpoint.problem()
        if damage is not None:
            yield Problem("checkpoint", step, None, damage)
            return
        labels = receipts.labels_of_table(step)
        found = table_of(checkpoint, labels)
    except Damaged as damaged:
        yield Problem("checkpoint", step, None, str(damaged))
        return
    state = checkpoint.state
    numbers = {"step": step, "updates": line.value["updates"], "consumed_samples": line.value["samples"]}
    for name, number in numbers.items():
        if state[name] != number:
            yield Problem(
                "checkpoint", step, None, f"{folder.name} says {name}={state[name]}, and the receipts {number}"
            )
    for name, theirs, ours in changed(receipts.start_of(step)["recipe"], state["recipe"]):
        yield Problem("recipe", step, None, f"{folder.name} says {name}={ours}, and the receipts {theirs}")
    wanted = decoded(line.value["digests"])
    differing = [label for label, a, b in zip(labels, found, wanted, strict=True) if a != b]
    if differing:
        known = _other_step(receipts, found, step)
        if known is not None:
            said = f"{folder.name} holds the weights of step {known}, not of step {step}"
            yield Problem("checkpoint", step, None, said)
            return
        for label in differing[:NAMED]:
            said = f"{words(label)} in {folder.name} is not that of the receipt of step {step}"
            yield Problem("checkpoint", step, tensor(label), said)
        if differing[NAMED:]:
            said = f"so are {counted(len(differing) - NAMED, 'more tensor')} of {len(labels)} in {folder.name}"
            yield Problem("checkpoint", step, None, said)


def _other_step(receipts: Receipts, found: list[int], step: int) -> int | None:
    """Return the step whose checkpoint had these digests; None where none had."""
    tables = {other: decoded(line.value["digests"]) for other, line in receipts.tables.items() if other != step}
    return next((other for other, table in tables.items() if table == found), None)


def words(label: str) -> str:
    """Return a label as people read it."""
    kind, _, name = label.partition("/")
    return f"the {kind} {name}" if kind == WEIGHT else f"the {kind} of {name}"


def tensor(label: str) -> str:
    """Return the name of a tensor, as a checkpoint has it."""
    kind, _, name = label.partition("/")
    return name if kind in (WEIGHT, GRADIENT) else f"{name}.{kind}"


def table_of(checkpoint: Checkpoint, labels: list[str]) -> list[int]:
    """Return the digests of a checkpoint's tensors. Raises Damaged where one is not there, or there twice in part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [_digest(checkpoint, label, device) for label in labels]


def _digest(checkpoint: Checkpoint, label: str, device: torch.device) -> int:
    total, count, wanted = torch.zeros((), dtype=torch.int64, device=device), 0, -1
    for name, piece, position in checkpoint.pieces(tensor(label)):
        values = torch.empty(piece.size)
        copy_overlap(checkpoint.folder / name, piece, position, piece.part, values)
        total += digest(values.to(device), Piece(label, 0, 0, piece.shape, piece.part))
        count, wanted = count + values.numel(), math.prod(piece.shape)
    if count != wanted:
        raise Damaged(checkpoint.folder, f"of {tensor(label)} {count} elements are there, where {wanted} are needed")
    return int(total.item())
