"""When a run saves a checkpoint, and what becomes of it where that fails."""

import time
from typing import Any

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.checkpoint.save import SaveClock, Saver
from dtgpt.config.sections import CheckpointConfig
from dtgpt.run.folder import RunLock
from dtgpt.run.report import NullReport, Report
from dtgpt.train.checkpoints import state_of
from dtgpt.train.ending import folder_lost, resume_option
from dtgpt.train.observer import AfterStep, Observer, Turn, is_due
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError


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
