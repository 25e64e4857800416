"""Worker processes for one task over a stream of blocks; results come in the order of the blocks.

A worker is a plain `python -c`, spoken to in pickles over its standard streams: the caller's script is
not imported again, nothing of its state is forked, and a worker whose parent is gone reads an end of file and ends.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dtgpt.console import say
from dtgpt.errors import UserError
from dtgpt.threads import Threads

AHEAD = 3  # blocks per worker that are read before the first of them must be done: bounds memory
PATIENCE = 5.0  # seconds for a worker whose streams are closed to be gone


@contextmanager
def ordered_map(task: Callable[[Any], Any], workers: int) -> Iterator[Callable[[Iterable], Iterator]]:
    """A function that maps blocks to `task(block)`, in order, in `workers` processes (1: in this one).

    `task` and the blocks are pickled. Raises UserError where `task` did, or where a worker was killed; RuntimeError,
    with the worker's traceback, for any other exception of `task`. No process is left when the context ends.
    """
    pool = _Pool(task, workers) if workers > 1 else None
    if pool is None or not pool.size:
        yield lambda blocks: map(task, blocks)
        return
    try:
        yield pool.map
    finally:
        pool.close()


class _Pool:
    def __init__(self, task: Callable[[Any], Any], workers: int):
        self._processes: list[subprocess.Popen] = []
        self._idle: SimpleQueue = SimpleQueue()
        self._closing = False
        self._setup = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        self._greeted: set[int] = set()
        self._threads: Threads | None = None
        try:
            for _ in range(workers):
                self._processes.append(_start())
                self._idle.put(self._processes[-1])
        except BlockingIOError as error:  # a limit on processes
            say(f"{self.size} of {workers} worker processes could be started ({error.strerror})", warning=True)
        except BaseException:
            self.close()
            raise
        # One thread for each worker: it sleeps in the pipes while the worker encodes.
        self._threads = Threads(self.size)

    @property
    def size(self) -> int:
        return len(self._processes)

    def map(self, blocks: Iterable) -> Iterator:
        pending: deque[Future] = deque()
        for block in blocks:
            pending.append(self._threads.submit(self._ask, block))
            if len(pending) >= AHEAD * len(self._processes):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _ask(self, block: Any) -> Any:
        process = self._idle.get()
        try:
            if process.pid not in self._greeted:
                self._greeted.add(process.pid)
                process.stdin.write(self._setup)
            pickle.dump(block, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            kind, answer = pickle.load(process.stdout)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            raise UserError(self._why_gone(process)) from None
        finally:
            self._idle.put(process)
        if kind == "result":
            return answer
        raise UserError(answer) if kind == "refused" else RuntimeError(f"in a worker process:\n{answer}")

    def _why_gone(self, process: subprocess.Popen) -> str:
        if self._closing:
            return "the preparation was ended"
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        code = process.returncode
        how = f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return (
            f"a worker process {how}, as happens where memory runs out; nothing was written, so start again, with "
            f"fewer --workers than {len(self._processes)} if memory is short"
        )

    def close(self) -> None:
        """End the workers, whatever they are at."""
        self._closing = True
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):  # what was still to be written has no reader
                    stream.close()
            process.wait()


def _start() -> subprocess.Popen:
    # dtgpt itself must be found where this process found it; -P: not a json.py of the working folder.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-c", "from dtgpt.prepare.pool import _serve; _serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _serve() -> None:
    """The worker: reads the task, then blocks until the parent closes the pipe, and answers each."""
    for number in (signal.SIGINT, signal.SIGHUP):  # these reach the whole group; the parent ends its workers
        signal.signal(number, signal.SIG_IGN)
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not garble the answers
    with suppress(EOFError, BrokenPipeError):
        task = pickle.load(requests)
        while True:
            block = pickle.load(requests)
            pickle.dump(_attempt(task, block), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    os._exit(0)  # whatever is still buffered has no reader


def _attempt(task: Callable[[Any], Any], block: Any) -> tuple[str, Any]:
    try:
        return "result", task(block)
    except UserError as error:
        return "refused", str(error)
    except BaseException:  # a panic of tiktoken is no Exception
        return "failed", traceback.format_exc()
