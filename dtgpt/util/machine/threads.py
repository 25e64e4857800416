"""Work for several threads, also where the system refuses to start any.

Machines of many users limit the threads of each. Python's own executors put work into their queue before they start a
thread for it: where that fails, nobody knows whether the work will be done."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Threads(Executor):
    """An executor of `count` threads, or of as many as can be started. Where none can be, as under a limit on
    processes, `submit` does the work itself."""

    def __init__(self, count: int):
        self._tasks: SimpleQueue = SimpleQueue()
        self._threads: list[Thread] = []
        with suppress(RuntimeError):  # how Python says that the system refuses another thread
            for _ in range(count):
                thread = Thread(target=self._serve)
                thread.start()
                self._threads.append(thread)

    def submit(self, work: Callable, /, *arguments: Any, **options: Any) -> Future:
        future: Future = Future()
        task = partial(work, *arguments, **options)
        if self._threads:
            self._tasks.put((future, task))
        else:
            _run(future, task)
        return future

    def __exit__(self, *exception: object) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            with suppress(BaseException):  # which the future holds
                _run(*task)


def _run(future: Future, task: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):  # Ctrl-C
            raise
