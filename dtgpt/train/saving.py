"""When a run saves a checkpoint, and what becomes of it where that fails; how a run ends, and what is left to do
where it goes on after its last step."""

import signal
import time
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import Any

from dtgpt.checkpoint.manifest import Checkpoint, list_checkpoints, step_of
from dtgpt.checkpoint.save import SaveClock, Saver
from dtgpt.config.sections import CheckpointConfig
from dtgpt.data.dataset import Dataset
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import AUTO, RunLock
from dtgpt.run.report import NullReport, Report
from dtgpt.run.signals import StopRequest
from dtgpt.run.sinks import read_records
from dtgpt.train.checkpoints import state_of
from dtgpt.train.observer import AfterStep, HeldOutLoss, Observer, Past, Turn, is_due
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError

OVER = "{} has done its {}; nothing is left to do"


def is_over(run: Path, checkpoint: Checkpoint, steps: int, resume: str | None) -> bool:
    """Return whether the run has done more than `steps`, and say so. Raises UserError where the user named the run."""
    done = checkpoint.state["step"]
    if done > steps and resume != AUTO:
        raise UserError(f"{run} has already done {counted(done, 'step')}; raise --steps to go on")
    if done > steps:
        say(OVER.format(run, counted(done, "step")))
    return done > steps


def left_to_do(
    run: Path, step: int, steps: int, sample_length: int, observers: Iterable[Observer], dataset: Dataset
) -> list[str]:
    """Return the titles of observers whose work after `step`, the newest of the run's `steps`, the run does not hold.
    Says so where all steps are done and that is nothing."""
    due = [observer for observer in to_make_up(observers) if observer.due(step)]
    if not due:
        return []
    records = [record for record in read_records(run / "metrics.jsonl") if record["step"] == step]
    left: list[str] = []
    for observer in due:
        if observer.left(Past(run, step, records, list(left), dataset, sample_length)):
            left.append(observer.title)
    if not left and step == steps:
        say(OVER.format(run, counted(steps, "step")))
    return left


def to_make_up(observers: Iterable[Observer]) -> list[Observer]:
    """Return the observers that have a title, in the order in which a run that goes on makes up for what is left: the
    losses first, by which a run is judged."""
    titled = [observer for observer in observers if observer.title]
    return sorted(titled, key=lambda observer: (not isinstance(observer, HeldOutLoss), observer.turn))


def say_stopped(
    where: str, hint: str, stop: StopRequest, minutes: float | None, interval: int | None, mesh: Mesh
) -> int:
    """Say why a run ends early. Return its exit code: 0 after `exit_after` minutes or by `exit_interval`, else 128 +
    the signal, agreed across ranks."""
    number = int(mesh.max(stop.requested or 0))
    code, reason = 128 + (number or signal.SIGTERM), ""
    if number == 0 and interval is not None:
        code, reason = 0, f" (exit_interval {interval})"
    elif number == 0 and minutes is not None:
        code, reason = 0, f" after {minutes:g} minute{'' if minutes == 1 else 's'} (exit_after)"
    say(f"stopped {where}{reason}{hint}")
    return code


def folder_lost(run: Path, step: int) -> UserError:
    return UserError(
        f"the run folder {run} was moved, removed or replaced while the run was at step {step}; nothing more is "
        "written: put the folder back and go on with --resume, or begin again"
    )


def resume_option(run: Path) -> str:
    """Return the option by which a run goes on, as a shell reads it."""
    return f"--resume {quote(str(run))}"


def tell_other_end(former: dict[str, Any], recipe: dict[str, Any], trainer: Trainer) -> None:
    """Warn where another batch size than that of the `former` recipe lets the steps of a run end elsewhere than its
    schedule in samples, beyond which the learning rate may be 0."""
    end, steps, sizes = trainer.schedule.end, trainer.steps, ("global_batch_size", "rampup_batch_size")
    seen, next_step = trainer.samples_before(steps), trainer.samples_before(steps + 1)
    same_sizes = all(former.get(name) == recipe[name] for name in sizes)
    if trainer.schedule.counts_samples and not same_sizes and not seen <= end < next_step:
        say(
            f"with another batch size, {counted(steps, 'step')} end after {counted(seen, 'sample')}, the schedule "
            f"after {end}; to end there, give --train_samples {end}",
            warning=True,
        )


class Saving(Observer):
    """Save checkpoints: at an interval of steps or of minutes, after the last step, and where the run ends before."""

    turn = Turn.SAVE
    saver: Saver  # once there is a run folder

    def __init__(self, trainer: Trainer, lock: RunLock, recipe: dict[str, Any], options: CheckpointConfig):
        """recipe: its fields, which checkpoints keep."""
        self._trainer, self._lock = trainer, lock
        self._recipe, self._options = recipe, options
        self.clock = SaveClock(options.minutes)
        self.asked = False  # to save after this step at any rate, as all ranks agreed

    def due(self, step: int) -> bool:
        return step == self._trainer.steps or is_due(step, self._options.interval) or self.asked

    def act(self, after: AfterStep) -> None:
        self.save(after.report, must=after.stopping or after.trainer.step == after.trainer.steps)
        self.clock.restart()

    def save(self, report: Report | NullReport, must: bool) -> None:
        """Begin to save a checkpoint. Where that fails (disk full) the run goes on with a warning, unless it `must`
        save: then this waits until it is written."""
        self.check_folder()
        trainer, checkpoints = self._trainer, self.saver.checkpoints
        state = state_of(trainer, self._recipe)
        begin = time.perf_counter()
        try:
            self.saver.save(trainer.step, state, must)
        except (OSError, UserError) as error:
            self.check_folder()  # which would explain it
            if must:
                again = f"to go on, add {resume_option(checkpoints.parent)}"
                raise UserError(f"{error}; {again if list_checkpoints(checkpoints) else 'then start again'}") from None
            say(f"{error}; training goes on", warning=True)
        else:
            if trainer.timers.enabled:
                seconds = trainer.mesh.max(time.perf_counter() - begin)
                line = f"training waited {seconds:.2f} s for the checkpoint"
                report.figures(trainer.step, {"save_seconds": seconds}, line)

    def save_unless_saved(self, report: Report | NullReport) -> None:
        """Save a checkpoint of this step, unless there is one."""
        step, folder = self._trainer.step, self.saver.checkpoints
        self.saver.wait()
        if not self._trainer.mesh.on_rank_0(lambda: step in map(step_of, list_checkpoints(folder))):
            self.save(report, must=True)

    def check_folder(self) -> None:
        """Raise UserError, on all ranks, where the run folder is gone."""
        if self._trainer.mesh.any(self._lock.lost(at_once=True)):
            raise folder_lost(self.saver.checkpoints.parent, self._trainer.step)
