"""Map a function over a stream of blocks in worker processes; results come in the order of the blocks.

Each worker has a pipe of its own, so that a worker and its parent each read an end of file when the other is killed.
`concurrent.futures.ProcessPoolExecutor` does not do: its workers outlive a parent that is killed, and before Python
3.14 it cannot end a worker that is at work.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.machine.threads import Threads

AHEAD = 3  # blocks per worker that are read before the first of them must be done: bounds memory
PATIENCE = 5.0  # seconds for a worker whose pipe is closed to be gone

Task = Callable[[Any], Any]


@contextmanager
def ordered_map(task: Task, workers: int) -> Iterator[Callable[[Iterable], Iterator]]:
    """Provide a function that maps blocks to `task(block)`, in order, in `workers` processes (1: in this one).

    `task` and the blocks are pickled. Raises UserError where `task` did, or where a worker was killed; RuntimeError,
    with the worker's traceback, for any other exception of `task`. All processes have ended when the context ends.
    """
    count = workers if workers > 1 else 0
    idle: SimpleQueue[Task] = SimpleQueue()
    with ExitStack() as stack:
        # One thread for each worker: it sleeps in the pipe while the worker is busy. The workers end first.
        threads = stack.enter_context(Threads(count))
        pickled = pickle.dumps(task)
        try:
            for _ in range(count):
                idle.put(stack.enter_context(_worker(pickled)))
        except BlockingIOError as error:  # a limit on processes
            say(f"{idle.qsize()} of {count} worker processes could be started ({error.strerror})", warning=True)
        started = idle.qsize()

        def run(block: Any) -> Any:
            worker = idle.get()
            try:
                return worker(block)
            finally:
                idle.put(worker)

        def map_blocks(blocks: Iterable) -> Iterator:
            pending: deque[Future] = deque()
            for block in blocks:
                pending.append(threads.submit(run, block))
                if len(pending) >= AHEAD * started:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

        yield map_blocks if started else partial(map, partial(_within_memory, task))


def _within_memory(task: Task, block: Any) -> Any:
    try:
        return task(block)
    except MemoryError:
        raise UserError(
            "memory ran out for a part of the input; nothing was written, so start again with fewer --workers, or cut "
            "long lines and texts"
        ) from None


@contextmanager
def _worker(task: bytes) -> Iterator[Task]:
    """Provide a function that runs the pickled `task` on a block in a process that is alive within the context."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, task), daemon=True)

    def run(block: Any) -> Any:
        try:
            pipe.send(block)
            answer = pipe.recv()
        except (OSError, EOFError):
            process.join(PATIENCE)
            raise _ended(process.exitcode) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # else the worker would run the user's script again
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
        theirs.close()
    try:
        yield run
    finally:
        process.kill()
        process.join()


def _ended(code: int | None) -> UserError:
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    return UserError(
        f"a worker process {how}, as happens where memory runs out; nothing was written, so start again, with fewer "
        "--workers if memory is short"
    )


def _serve(pipe: Connection, pickled: bytes) -> None:
    """Run the task on each block from the pipe until the parent closes it."""
    for number in (signal.SIGINT, signal.SIGHUP):  # these reach the whole group; the parent ends its workers
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        task = pickle.loads(pickled)
        while True:
            block = pipe.recv()
            try:
                answer = _within_memory(task, block)
            except UserError as error:
                answer = error
            except BaseException:  # a panic of tiktoken is not an Exception
                answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            pipe.send(answer)
