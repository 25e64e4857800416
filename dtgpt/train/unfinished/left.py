"""Work after the newest step that a run does not hold: found on rank 0, in the run folder, and done on all ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.data.dataset import Dataset
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.records import read_records
from dtgpt.train.loop import Loop
from dtgpt.train.observer import HeldOutLoss, Observer, Unfinished
from dtgpt.util.console import say


class Past(NamedTuple):
    """What a run folder holds of the newest step, for observers to find what is missing. Rank 0 alone looks."""

    run: Path
    step: int
    records: list[dict[str, Any]]  # of this step
    left: list[str]  # titles of what was found missing before
    dataset: Dataset
    sample_length: int


class Left(Unfinished):
    """Find and do what titled observers have left."""

    def find(
        self, mesh: Mesh, run: Path, step: int, observers: Iterable[Observer], data: tuple[Dataset, int]
    ) -> list[str]:
        return mesh.on_rank_0(lambda: left_to_do(run, step, observers, *data))

    def make_up(self, loop: Loop, left: list[str]) -> bool:
        trainer = loop.trainer
        say(f"{trainer.step} steps are done; left to do: {', '.join(left)}")
        with loop.report.paused():
            for observer in to_make_up(loop.observers):
                if observer.title in left:
                    observer.act(loop.after_step())
        if not (early := loop.interrupted()) and trainer.step == trainer.steps:
            say("all is done")
        return early

    def was_cut_short(self, loop: Loop, due: list[Observer]) -> bool:
        """Where it is so, save a checkpoint of this step: with other weights observers would find other values."""
        is_last = loop.trainer.step == loop.trainer.steps  # which has its checkpoint
        if is_last or not any(observer.title for observer in due) or not loop.interrupted():
            return False
        loop.saving.save_unless_saved(loop.report)
        return True


def left_to_do(run: Path, step: int, observers: Iterable[Observer], dataset: Dataset, sample_length: int) -> list[str]:
    """Return the titles of observers whose work after `step`, the newest of the run, the run does not hold."""
    records = [record for record in read_records(run / "metrics.jsonl") if record["step"] == step]
    left: list[str] = []
    for observer in to_make_up(observers):
        if observer.due(step) and observer.left(Past(run, step, records, list(left), dataset, sample_length)):
            left.append(observer.title)
    return left


def to_make_up(observers: Iterable[Observer]) -> list[Any]:
    """Return the observers that have a title, in the order in which a run that goes on makes up for what is left: the
    losses first, by which a run is judged."""
    titled = [observer for observer in observers if observer.title]
    return sorted(titled, key=lambda observer: (not isinstance(observer, HeldOutLoss), observer.turn))
