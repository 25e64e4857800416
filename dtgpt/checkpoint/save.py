"""Saving a checkpoint: every rank writes what it alone holds, and rank 0 makes a checkpoint of the folder.

The folder has another name until all is in it and on the disk. Whatever fails before the rename leaves the older
checkpoints as they were. Here training waits until all is written; a capability may write beside the next steps.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.manifest import (
    commit,
    list_checkpoints,
    make_folder,
    point_latest,
    remove,
    step_folder,
    step_of,
    wait_until_visible,
)
from dtgpt.checkpoint.shard_file import Written, files_of
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.shards import Shards
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.storage import remove_tree


class Failed(UserError):
    """Why a rank has not written its part, and what to do about it."""

    def __init__(self, reason: str, advice: str):
        super().__init__(reason)
        self.advice = advice


class SaveClock:
    """When the next checkpoint is due by time, on the clock of this process."""

    def __init__(self, minutes: float | None):
        self._seconds = math.inf if minutes is None else 60 * minutes
        self.restart()

    def restart(self) -> None:
        """Begin to count, also after a checkpoint for another reason."""
        self._due = time.monotonic() + self._seconds

    def asks(self) -> bool:
        """Return whether a checkpoint is due: once, since all ranks may learn it one step later."""
        due = time.monotonic() >= self._due
        if due:
            self._due = math.inf
        return due


class Saver:
    """Saves the checkpoints of one run into the folder `checkpoints`; a context that waits for the last one.

    `before_update` must be called before anything changes weights or the optimizer's state. Where a capability writes
    in the background, `Saver(...)` is an object of its class.
    """

    def __new__(cls, *_: Any, **options: Any) -> "Saver":
        kinds = seams.listed("savers") if cls is Saver else []
        return super().__new__(kinds[0] if kinds else cls)

    def __init__(
        self,
        checkpoints: Path,
        shards: Shards,
        optimizer: Optimizer,
        keep_last: int = 0,
        keep_every: int = 0,
        background: bool = True,
        timeout: float = 600.0,
        completed: Callable[[int, int], None] = lambda step, size: None,
    ):
        """keep_last: newest ones to keep, 0: all. keep_every: steps whose multiples are kept for ever, 0: none.
        background: whether what can may write beside training, from copies. timeout: seconds within which
        all ranks must have written. completed: called on rank 0, in any thread, with the step of a checkpoint that is
        complete and its bytes."""
        self.checkpoints, self.mesh = checkpoints, shards.mesh
        self._keep_last, self._keep_every, self._timeout = keep_last, keep_every, timeout
        self._background, self._completed = background, completed
        self._files = list(files_of(shards, optimizer))

    def save(self, step: int, state: dict[str, Any], must: bool = False) -> None:
        """Save the present weights and state of the optimizer. `state`: what `state.json` is to say. Raises UserError,
        on all ranks, where the folder cannot be made. What fails later is a warning; where the checkpoint `must` be, it
        is a UserError on all ranks."""
        partial = self._begin(step)
        reports = self.mesh.gather(self._write_here(partial))
        failure = self.mesh.on_rank_0(lambda: self._finish(partial, step, state, reports))
        if failure and must:
            raise UserError(failure)
        if failure:
            say(f"{failure}; training goes on", warning=True)

    def before_update(self) -> None:
        """Let what comes next wait until nothing reads the weights any more."""

    def wait(self) -> None:
        """Wait until this rank has no more to do for the last checkpoint."""

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.wait()

    def _begin(self, step: int) -> Path:
        """Return a new folder that all ranks see. Raise UserError, on all of them, where there is none."""
        partial = self.mesh.on_rank_0(lambda: self._make_folder(step))
        if self.mesh.any(not wait_until_visible(partial)):
            raise UserError(f"{partial} is not seen by all nodes; let --runs name a folder that they share")
        return partial

    def _write_here(self, partial: Path) -> tuple[dict[str, Written], tuple[str, str] | None]:
        """Return what this rank has written, and why it could not, with advice."""
        try:
            return {file.name: file.write_at_once(partial) for file in self._files}, None
        except Exception as error:
            return {}, (f"rank {self.mesh.rank}: {str(error) or repr(error)}", remedy(error))

    def _finish(self, partial: Path, step: int, state: dict[str, Any], reports: list[Any]) -> str | None:
        """Make a checkpoint of the folder on rank 0; return why there is none."""
        try:
            for _, failure in reports:
                if failure:
                    raise Failed(*failure)
            self._commit(partial, step, state, {name: file for files, _ in reports for name, file in files.items()})
        except Exception as error:
            remove_tree(partial)
            return self._sentence(step, error)
        return None

    def _make_folder(self, step: int) -> Path:
        with suppress(OSError):  # after the save, that is told
            self._remove_old(step)  # of a start that kept more: on a full disk they would stand in the way of this one
        try:
            return make_folder(self.checkpoints, step)
        except OSError as error:
            raise UserError(self._sentence(step, error)) from None

    def _sentence(self, step: int, error: Exception) -> str:
        advice = error.advice if isinstance(error, Failed) else remedy(error)
        sentence = f"no checkpoint of step {step} could be written to {self.checkpoints} ({str(error) or repr(error)})"
        return f"{sentence}; {advice}" if advice else sentence

    def _commit(self, partial: Path, step: int, state: dict[str, Any], files: dict[str, Written]) -> None:
        """Make a checkpoint of the folder, on rank 0, when all files are in it."""
        folder = step_folder(self.checkpoints, step)
        commit(partial, folder, state, files)
        self._completed(step, sum(file.num_bytes for file in files.values()))
        # Older ones first: where the disk is full, that makes room for the name.
        for work, what in (
            (lambda: self._remove_old(step), "what is older could not be cleared away"),
            (lambda: point_latest(self.checkpoints, folder), "latest could not be renewed"),
        ):
            try:
                work()
            except Exception as error:  # the checkpoint is there all the same
                say(f"{folder} is written, but {what} ({error})", warning=True)

    def _remove_old(self, step: int) -> None:
        """Keep the newest `keep_last` up to `step`, and multiples of `keep_every`."""
        if not self._keep_last:
            return
        older = [folder for folder in list_checkpoints(self.checkpoints) if step_of(folder) <= step]
        for folder in older[: -self._keep_last]:
            if not self._keep_every or step_of(folder) % self._keep_every:
                remove(folder)
