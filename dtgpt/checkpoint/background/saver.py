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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.checkpoint import shard_file
from dtgpt.checkpoint.save import Failed, Saver
from dtgpt.checkpoint.shard_file import Damaged, ShardFile, Written
from dtgpt.util.console import say, say_error
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.machine.threads import Threads
from dtgpt.util.shared.torch_private import post, posted
from dtgpt.util.storage import parse_json, read_regular, remove_tree, write_text

WRITERS = 4  # threads
POLL = 0.05  # s between two looks at what other ranks have written
GRACE = 10.0  # s that the last save of a run which fails may still take: other ranks may be gone
SHARE = 0.8  # of the timeout, after which rank 0 says who is late: before the ranks that wait for it give up
LONG = 1.0  # s of waiting that are worth a word
REPORT = "rank-{:05d}.json"


@dataclass
class StagedFile(ShardFile):
    """A file of this rank with a copy of its values on the host."""

    data: Tensor | None = None  # staging buffer, fp32, all pieces one after another

    def reserve(self, pinned: bool = False) -> Tensor:
        """Allocate the staging buffer once, and return it. A GPU copies to pinned memory beside other work."""
        if self.data is None:
            self.data = torch.empty(self.numel, pin_memory=pinned)
        return self.data

    def copy(self) -> None:
        """Queue copies of all values to the host."""
        self.copy_to(self.reserve())

    def write(self, folder: Path) -> Written:
        return shard_file.write_file(folder / self.name, self.pieces, self.reserve())


class BackgroundSaver(Saver):
    """A `Saver` that copies to the host beside the next passes, and writes behind the following steps; without
    `background` it takes no memory for copies, and stops training while it writes."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._staged = [StagedFile(file.name, file.pieces, file.values) for file in self._files]
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
        self.wait()
        if time.monotonic() - begin > LONG:
            waited = f"training waited {time.monotonic() - begin:.0f} s until the checkpoint before was written"
            say(f"{waited}; raise --checkpoint.interval or --checkpoint.minutes", warning=True)
        self._must = must
        partial = self._begin(step)
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

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        if failure is not None and not issubclass(failure, UserError):  # which all ranks raise, none of them gone
            self._alone_at = time.monotonic() + GRACE
        self.wait()

    def _reserve(self) -> None:
        """Allocate the staging buffers; where memory is short, this rank does without."""
        try:
            for file in self._staged if self._background else []:
                file.reserve(pinned=self._stream is not None)
        except (RuntimeError, MemoryError):
            say_error(
                f"warning: rank {self.mesh.rank} has no memory for copies of checkpoints: training waits until it has "
                "written"
            )
            self._background = False
            for file in self._staged:
                file.data = None

    def _begin_copy(self) -> torch.cuda.Event | threading.Event:
        """Queue the copies on a stream beside that of the run, on a GPU; on a CPU the thread makes them."""
        if self._stream is None:
            return threading.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for file in self._staged:
                file.copy()
            copied = torch.cuda.Event()
            copied.record()
        return copied

    def _work(
        self, partial: Path, step: int, state: dict[str, Any], copied: torch.cuda.Event | threading.Event | None
    ) -> None:
        """Run the thread: write this rank's files, then on rank 0 everything else. Whatever fails, training goes on."""
        try:
            written = self._write(partial, copied)
            if self.mesh.rank == 0:
                self._commit(partial, step, state, written | self._reports(partial))
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
            return {file.name: file.write_at_once(partial) for file in self._staged}
        if isinstance(copied, threading.Event):
            try:
                for file in self._staged:
                    file.copy()
            finally:
                copied.set()
        else:
            copied.synchronize()
        with Threads(WRITERS) as pool:
            written = pool.map(lambda file: file.write(partial), self._staged)
            return {file.name: found for file, found in zip(self._staged, written, strict=True)}

    def _give_up(self, partial: Path, step: int, error: Exception) -> None:
        """Remove the folder on rank 0: it does not become a checkpoint, whatever the other ranks still write."""
        remove_tree(partial)
        self._failure = self._sentence(step, error)
        if not self._must:
            say(self._failure + "; training goes on" * (self._alone_at == math.inf), warning=True)

    def _post(self, partial: Path, error: Exception) -> None:
        """Tell rank 0, on another rank, that this rank's part will not come, and why."""
        for file in self._staged:
            with suppress(OSError):
                (partial / file.name).unlink(missing_ok=True)
        reason = f"rank {self.mesh.rank}: {str(error) or repr(error)}"
        try:
            post(partial.name, json.dumps([reason, remedy(error)]))
        except RuntimeError:  # rank 0, or who started the ranks, is gone
            say_error(f"warning: rank {self.mesh.rank} cannot report its part of a checkpoint ({reason})")

    def _reports(self, partial: Path) -> dict[str, Written]:
        """Return the files of all other ranks, when they are written."""
        ranks = range(1, self.mesh.world)
        files = {name: file for rank in ranks for name, file in self._report(partial, rank).items()}
        # A report may be of another attempt at the same step, whose files are in another folder, or in none.
        for name, file in files.items():
            if (size := (partial / name).stat().st_size) != file.num_bytes:
                raise Damaged(partial / name, f"it has {size} bytes, {file.num_bytes} were written")
        return files

    def _report(self, partial: Path, rank: int) -> dict[str, Written]:
        """Return the files of another rank when they are written. Raise Failed where any rank could not write, or is
        late."""
        path = partial / REPORT.format(rank)
        while not path.exists():
            if text := posted(partial.name):
                raise Failed(*json.loads(text))
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
