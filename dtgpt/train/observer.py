"""What happens between the steps of a run is done by observers: the progress line, held-out losses, checkpoints, and
what capabilities bring, such as generated texts.

The loop would otherwise have a branch for each of them, and a rule of who comes before whom; it has one line for all,
and knows none.

The loop asks each after each step whether something is `due`, and lets those `act` that say so, on all ranks together
and in the order of `Turn`. What a signal or a kill cuts short is not lost: a capability lets the next start make up for
it (`Unfinished`). So an observer whose act takes long, or leaves something in the run folder, has a `title`, and says
what is `left`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from dtgpt.config.sections import LogConfig
from dtgpt.data.dataset import PART_NAMES, Dataset, HeldOutPart
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.records import Begun, Sink
from dtgpt.run.report import Report
from dtgpt.train.interval_loss import IntervalLoss, check_finite
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import say
from dtgpt.util.hardware import peak_memory


class Turn(IntEnum):
    """The order of what is due after the same step."""

    REPORT = 0
    VALIDATION = 1
    SAVE = 2  # before what takes longer, which a kill may cut short
    MEASURE = 3
    TEST = 4
    SAMPLE = 5
    END = 6


@dataclass(frozen=True, kw_only=True)
class AfterStep:
    """What observers see of a run after a step, or where it goes on and makes up for what was cut short."""

    trainer: Trainer
    run: Path  # the run folder, in which rank 0 alone writes
    report: Report  # which tells on rank 0 alone
    interrupted: Callable[[], bool]  # whether any rank has been asked to end; all ranks call it together
    must_end: Callable[[], bool]  # whether this rank has
    stopping: bool = False  # no step comes after this one in this process
    loss: float | None = None  # of the step; None where no token counted
    interval_loss: float | None = None  # mean of the steps of the interval
    grad_norm: float = 0.0


class Observer:
    """Does something after some of the steps. A class of this one has what it needs of these methods."""

    turn = Turn.MEASURE
    title = ""  # as a user reads it where a run goes on; empty: there is nothing to make up for

    def prepare(self, trainer: Trainer) -> None:
        """Get ready, on every rank. Raises UserError, on every rank, before a run folder is made."""

    def due(self, step: int) -> bool:
        """Return whether something is to be done after this step, the same on every rank."""
        return False

    def act(self, after: AfterStep) -> None:
        """Do it, on every rank."""

    def sink(self, begun: Begun) -> Sink | None:
        """Return where the records of the run go, beside its metrics.jsonl. Rank 0 alone calls it."""
        return None


class Unfinished:
    """What a start does of the work that an earlier one has left undone after its newest step. Here nothing; a
    capability finds and does what the titled observers have left. All ranks call the methods together."""

    def find(
        self, mesh: Mesh, run: Path, step: int, observers: Iterable[Observer], data: tuple[Dataset, int]
    ) -> list[str]:
        """Return the titles of observers whose work after `step`, the newest of the run, the run does not hold. data:
        with the length of samples."""
        return []

    def make_up(self, loop: Any, left: list[str]) -> bool:
        """Do what is `left`, in a `train.loop.Loop` at that step. Return whether the run was asked to end before all of
        it was done."""
        return False

    def was_cut_short(self, loop: Any, due: list[Observer]) -> bool:
        """Return whether the run was asked to end while observers acted that a later start makes up for."""
        return False


def is_due(step: int, interval: int) -> bool:
    """Return whether the interval, 0: never, divides the step, which is not 0: nothing is due before the first."""
    return interval > 0 and step > 0 and step % interval == 0


class HeldOutLoss(Observer):
    """The loss on the part of the data that is for validation, at an interval, or for test, after the last step."""

    def __init__(self, part: HeldOutPart, interval: int, steps: int):
        """interval: 0: after the last step only."""
        self.part, self.turn = part, Turn.VALIDATION if part == "valid" else Turn.TEST
        self.title = "validation loss" if part == "valid" else "test loss"
        self._interval, self._steps = interval, steps

    def due(self, step: int) -> bool:
        return step == self._steps or is_due(step, self._interval)

    def act(self, after: AfterStep) -> None:
        trainer, name = after.trainer, PART_NAMES[self.part]
        found = trainer.held_out(self.part, after.interrupted)
        if found is not None:
            check_finite(trainer.step, " and ".join(found.finite), *found.finite.values())
            figures = {f"{name}_{figure}": value for figure, value in found.figures.items()}
            after.report.figures(trainer.step, figures, f"{name} {found.shown}")

    def left(self, past: Any) -> bool:
        """Return whether a run does not hold the loss of its newest step. past: a `train.unfinished.left.Past`."""
        has_samples = next(past.dataset.held_out(self.part, past.sample_length, 1, 1), None) is not None
        name = f"{PART_NAMES[self.part]}_loss"
        return has_samples and all(record.get(name) is None for record in past.records)


class Progress(Observer):
    """Say how far the run is and how it does. The first step of a start has a line of its own: one sees that it runs,
    and how large the loss is. It is recorded where it is the first of the run, so that a resume records no more."""

    turn = Turn.REPORT

    def __init__(self, log: LogConfig, steps: int, sample_length: int, interval: IntervalLoss):
        self._every, self._steps, self._sample_length = log.interval, steps, sample_length
        self._interval = interval
        self._began = False
        self._cautioned = False  # once in a start

    def due(self, step: int) -> bool:
        return self._is_recorded(step) or not self._began

    def _is_recorded(self, step: int) -> bool:
        return step == 1 or step == self._steps or is_due(step, self._every)

    def act(self, after: AfterStep) -> None:
        trainer, step, self._began = after.trainer, after.trainer.step, True
        recorded = self._is_recorded(step)
        metrics = {
            **({} if after.interval_loss is None else {"loss": after.interval_loss}),
            **({} if after.loss is None else {"step_loss": after.loss}),
            "grad_norm": after.grad_norm,
            "lr": trainer.optimizer.lr.item(),
            "tokens": trainer.samples_before(step) * self._sample_length,
            "memory_gib": trainer.mesh.max(peak_memory(trainer.mesh.device)),
            "batch_size": trainer.sizes.at(step - 1),
            **trainer.objective.figures(self._interval),
            **trainer.optimizer.metrics(),
            **trainer.timers.seconds(trainer.mesh),
        }
        after.report.step(step, metrics, recorded)
        if line := trainer.timers.line(metrics, trainer.settings.graphs):
            say(line)
        if not self._cautioned and (caution := trainer.objective.caution(metrics)):
            say(caution, warning=True)
            self._cautioned = True
        if recorded and (texts := trainer.objective.examples()):
            after.report.examples(step, texts)
        # Before a checkpoint of this step, which keeps the interval, and after all that reads it.
        if is_due(step, self._every):
            self._interval.restart()
