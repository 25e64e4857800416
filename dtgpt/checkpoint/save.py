"""Saving without stopping: copy to the host beside the next passes, write behind the following steps.

Every rank copies what it alone has to write into memory of its own and goes on. A thread writes its files and leaves a
report; rank 0's thread waits for the reports of all ranks, writes `state.json`, and renames the folder. Ranks meet
through the folder and not through collectives, which belong to the training thread. A rank that fails may be unable to
write at all: it says so through the store of the process group. Whatever fails before the rename leaves the older
checkpoints as they were.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

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
from dtgpt.util.console import say, say_error
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.storage import parse_json, read_regular, remove_tree, write_text
from dtgpt.util.threads import Threads

WRITERS = 4  # threads
POLL = 0.05  # s between two looks at what other ranks have written
GRACE = 10.0  # s that the last save of a run which fails may still take: other ranks may be gone
SHARE = 0.8  # of the timeout, after which rank 0 says who is late: before the ranks that wait for it give up
LONG = 1.0  # s of waiting that are worth a word
REPORT = "rank-{:05d}.json"


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

    `before_update` must be called before anything changes weights or the optimizer's state.
    """

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
        background: False takes no memory for copies, and stops training while it writes. timeout: seconds within which
        all ranks must have written. completed: called on rank 0, in any thread, with the step of a checkpoint that is
        complete and its bytes."""
        self.checkpoints, self.mesh = checkpoints, shards.mesh
        self._keep_last, self._keep_every, self._timeout = keep_last, keep_every, timeout
        self._background, self._completed = background, completed
        self._files = list(files_of(shards, optimizer))
        self._stream = torch.cuda.Stream() if self.mesh.device.type == "cuda" else None
        self._copied: torch.cuda.Event | threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._must = False
        # On the monotonic clock: when rank 0 says which rank has not written its part, and from when on it waits for no
        # rank any more, because the run has failed.
        self._late_at = self._alone_at = math.inf
        self._reserve()

    def save(self, step: int, state: dict[str, Any], must: bool = False) -> None:
        """Begin to save the present weights and state of the optimizer. `state`: what `state.json` is to say. Raises
        UserError, on all ranks, where the folder cannot be made. What fails later is a warning; where the checkpoint
        `must` be, this waits for it, and raises UserError on all ranks."""
        begin = time.monotonic()
        self.wait()  # one at a time: the next one is copied into the memory from which the last one is written
        if time.monotonic() - begin > LONG:
            waited = f"training waited {time.monotonic() - begin:.0f} s until the checkpoint before was written"
            say(f"{waited}; raise --checkpoint.interval or --checkpoint.minutes", warning=True)
        self._must = must
        partial = self.mesh.on_rank_0(lambda: self._make_folder(step))
        if self.mesh.any(not wait_until_visible(partial)):
            raise UserError(f"{partial} is not seen by all nodes; let --runs name a folder that they share")
        self._failure, self._late_at = None, time.monotonic() + SHARE * self._timeout
        if self._background:
            self._copied = self._begin_copy()
            work = partial, step, state, self._copied
            thread = threading.Thread(target=self._work, args=work, name="checkpoint")
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # there can be no more threads
                self._work(*work)
        else:
            self._work(partial, step, state, None)
        if must:
            self.wait()
            if failure := self.mesh.on_rank_0(lambda: self._failure):
                raise UserError(failure)

    def before_update(self) -> None:
        """Let what comes next wait until the copies are made: on a GPU the stream waits, else this thread."""
        if isinstance(self._copied, threading.Event):
            self._copied.wait()
        elif self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        self._copied = None

    def wait(self) -> None:
        """Wait until this rank has no more to do for the last checkpoint."""
        self.before_update()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        if failure is not None and not issubclass(failure, UserError):  # which all ranks raise, none of them gone
            self._alone_at = time.monotonic() + GRACE
        self.wait()

    def _reserve(self) -> None:
        """Allocate the staging buffers; where memory is short, this rank does without."""
        try:
            for file in self._files if self._background else []:
                file.reserve(pinned=self._stream is not None)
        except (RuntimeError, MemoryError):
            say_error(
                f"warning: rank {self.mesh.rank} has no memory for copies of checkpoints: training waits until it has "
                "written"
            )
            self._background = False
            for file in self._files:
                file.data = None

    def _begin_copy(self) -> torch.cuda.Event | threading.Event:
        """Queue the copies on a stream beside that of the run, on a GPU; on a CPU the thread makes them."""
        if self._stream is None:
            return threading.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for file in self._files:
                file.copy()
            copied = torch.cuda.Event()
            copied.record()
        return copied

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

    def _work(
        self, partial: Path, step: int, state: dict[str, Any], copied: torch.cuda.Event | threading.Event | None
    ) -> None:
        """Run the thread: write this rank's files, then on rank 0 everything else. Whatever fails, training goes on."""
        try:
            written = self._write(partial, copied)
            if self.mesh.rank == 0:
                self._commit(partial, step, state, written)
            else:
                report = {name: [f.num_bytes, f.sha256] for name, f in written.items()}
                write_text(partial / REPORT.format(self.mesh.rank), json.dumps(report))
        except Exception as error:
            if self.mesh.rank == 0:
                self._give_up(partial, step, error)
            else:
                self._post(partial, error)

    def _write(self, partial: Path, copied: torch.cuda.Event | threading.Event | None) -> dict[str, Written]:
        if copied is None:
            return {file.name: file.write_at_once(partial) for file in self._files}
        if isinstance(copied, threading.Event):
            try:
                for file in self._files:
                    file.copy()
            finally:  # also where a copy fails: training waits for it
                copied.set()
        else:
            copied.synchronize()
        with Threads(WRITERS) as pool:
            written = pool.map(lambda file: file.write(partial), self._files)
            return {file.name: found for file, found in zip(self._files, written, strict=True)}

    def _commit(self, partial: Path, step: int, state: dict[str, Any], files: dict[str, Written]) -> None:
        """Wait on rank 0 for the other ranks, then make a checkpoint of the folder."""
        folder = step_folder(self.checkpoints, step)
        for rank in range(1, self.mesh.world):
            files = files | self._report(partial, rank)
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

    def _give_up(self, partial: Path, step: int, error: Exception) -> None:
        """Remove the folder on rank 0: it does not become a checkpoint, whatever the other ranks still write."""
        remove_tree(partial)
        self._failure = self._sentence(step, error)
        if not self._must:
            say(self._failure + "; training goes on" * (self._alone_at == math.inf), warning=True)

    def _post(self, partial: Path, error: Exception) -> None:
        """Tell rank 0, on another rank, that this rank's part will not come, and why."""
        for file in self._files:
            with suppress(OSError):
                (partial / file.name).unlink(missing_ok=True)
        reason = f"rank {self.mesh.rank}: {str(error) or repr(error)}"
        try:
            self.mesh.post(partial.name, json.dumps([reason, remedy(error)]))
        except RuntimeError:  # rank 0, or who started the ranks, is gone
            say_error(f"warning: rank {self.mesh.rank} cannot report its part of a checkpoint ({reason})")

    def _report(self, partial: Path, rank: int) -> dict[str, Written]:
        """Return the files of another rank when they are written. Raise Failed where any rank could not write, or is
        late."""
        path = partial / REPORT.format(rank)
        while not path.exists():
            if posted := self.mesh.posted(partial.name):
                raise Failed(*json.loads(posted))
            if not partial.is_dir():  # gone with the run's folder, and the report perhaps with it
                raise UserError(f"{partial} was moved or removed")
            if time.monotonic() > self._alone_at:
                raise UserError("the run ended before")
            if time.monotonic() > self._late_at:
                within = f"{SHARE * self._timeout:g} s (timeout={self._timeout:g})"
                raise Failed(
                    f"rank {rank} has not written its part within {within}",
                    f"see what rank {rank} says, or raise --timeout",
                )
            time.sleep(POLL)
            with suppress(OSError):
                next(partial.iterdir(), None)  # a network file system looks for new names then
        report = parse_json(read_regular(path))
        path.unlink()
        return {name: Written(*values) for name, values in report.items()}

    def _remove_old(self, step: int) -> None:
        """Keep the newest `keep_last` up to `step`, and multiples of `keep_every`."""
        if not self._keep_last:
            return
        older = [folder for folder in list_checkpoints(self.checkpoints) if step_of(folder) <= step]
        for folder in older[: -self._keep_last]:
            if not self._keep_every or step_of(folder) % self._keep_every:
                remove(folder)
