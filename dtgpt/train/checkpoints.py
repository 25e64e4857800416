"""What a checkpoint takes from a trainer and gives to a trainer under any plan, and when a run saves one.

The files are written in `checkpoint/`. Here stands what they mean to a run: `state_of` and `restore` are the two
directions, and `Saving` is the observer that decides when to save, and what becomes of a run whose disk is full or
whose folder is gone.
"""

import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from dtgpt.checkpoint.load import load_training
from dtgpt.checkpoint.manifest import Checkpoint, describe_model, list_checkpoints, step_of
from dtgpt.checkpoint.save import SaveClock, Saver
from dtgpt.config.schedule import BatchSizes
from dtgpt.config.sections import CheckpointConfig
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.optim.step_state import entries_of
from dtgpt.run.folder import RunLock, describe_run
from dtgpt.run.report import Report
from dtgpt.train.observer import AfterStep, Observer, Turn, is_due
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError

KEYS = ("weights", "data", "dropout", "sample")  # of random numbers, which a checkpoint tells


def state_of(trainer: Trainer, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what `state.json` says of the steps that are done. `recipe`: its fields."""
    settings, samples, root = trainer.settings, trainer.samples_before(trainer.step), root_key(recipe["seed"])
    return {
        "step": trainer.step,
        "consumed_samples": samples,
        "tokens": samples * settings.seq_length,
        "schedule": trainer.schedule.described(),
        "keys": {"seed": recipe["seed"], **{name: fold(root, name).tolist() for name in KEYS}},
        "plan": settings.plan.name,
        "world": settings.plan.world,
        "recipe": recipe,
        **describe_model(settings.model),
        **trainer.objective.state(trainer.step),
        "data_digest": trainer.dataset.digest,
        **trainer.optimizer.state(),
        **entries_of(trainer.states),
    }


def begin_run(run: Path, trainer: Trainer, recipe: dict[str, Any]) -> None:
    """Make `run` a run folder, which commands take as they take those of `dtgpt train`: with what was asked for, where
    it runs, and the tokenizer. `recipe`: its fields. Every rank calls it."""

    def write() -> None:
        run.mkdir(parents=True, exist_ok=True)
        describe_run(run, recipe, trainer.settings, trainer.mesh, trainer.dataset, trainer.step)

    trainer.mesh.on_rank_0(write)


def restore(checkpoint: Checkpoint, trainer: Trainer, sizes: Callable[[int, int], BatchSizes]) -> None:
    """Load the weights, the moments and the step of a checkpoint of any plan. `sizes` returns those of the batches of a
    run that goes on at a step, after a number of samples."""
    state = checkpoint.state
    load_training(checkpoint, trainer.shards, trainer.optimizer.rule)
    trainer.restore(state, sizes(state["step"], state["consumed_samples"]))


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

    def save(self, report: Report, must: bool) -> None:
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

    def save_unless_saved(self, report: Report) -> None:
        """Save a checkpoint of this step, unless there is one."""
        step, folder = self._trainer.step, self.saver.checkpoints
        self.saver.wait()
        if not self._trainer.mesh.on_rank_0(lambda: step in map(step_of, list_checkpoints(folder))):
            self.save(report, must=True)

    def check_folder(self) -> None:
        """Raise UserError, on all ranks, where the run folder is gone."""
        if self._trainer.mesh.any(self._lock.lost(at_once=True)):
            raise folder_lost(self.saver.checkpoints.parent, self._trainer.step)


def folder_lost(run: Path, step: int) -> UserError:
    return UserError(
        f"the run folder {run} was moved, removed or replaced while the run was at step {step}; nothing more is "
        "written: put the folder back and go on with --resume, or begin again"
    )


def resume_option(run: Path) -> str:
    """Return the option by which a run goes on, as a shell reads it."""
    return f"--resume {quote(str(run))}"
