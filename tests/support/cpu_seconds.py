"""Seconds that tests take on CPUs, those of all their processes counted. `--cpu-seconds=FILE` writes them.

Pools and programs of tests are children of a fork server, for which pytest does not wait, so that `time` does not see
them. Here the descendants that live are asked (/proc), and those whose parent has ended come to this process
(PR_SET_CHILD_SUBREAPER), which waits for them. Linux only.
"""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from tests.support.budgets import REFERENCE, loop

HELP = "write the CPU seconds of all processes of the tests, by file, with those of the loop that marks are scaled by"
FOLDER = "DTGPT_CPU_SECONDS"  # environment variable: where the workers of a run write
LOOPS = 30.0  # seconds between two measurements of the loop
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
TICK = os.sysconf("SC_CLK_TCK")
PAUSE = 0.2  # seconds between two looks for processes whose parent has ended


class CpuSeconds:
    """A clock of the CPU time of this process and of all that descend from it."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "this process cannot wait for those whose parent has ended")
        self._own = set(children_of(os.getpid()))  # this process has started them, and waits for them
        self._lock = threading.Lock()
        _note_starts(self._own)
        threading.Thread(target=self._wait_for_orphans, daemon=True).start()

    def now(self) -> float:
        """Return the seconds up to now: of this process, of ended children that were waited for, of living ones."""
        with self._lock:
            found, waiting = sum(os.times()[:4]), children_of(os.getpid())
            while waiting:
                pid = waiting.pop()
                found += seconds_of(pid)
                waiting += children_of(pid)
            return found

    def _wait_for_orphans(self) -> None:
        foreign: set[int] = set()
        while True:
            time.sleep(PAUSE)
            with self._lock:
                seen = set(children_of(os.getpid())) - self._own
                for pid in seen & foreign:  # seen twice: what has just been started may not be in `_own` yet
                    with suppress(ChildProcessError):
                        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)  # its time becomes that of waited children
                foreign = seen


def file_of(item: Any) -> str:
    return item.nodeid.partition("::")[0]


@functools.cache
def clock() -> CpuSeconds:
    """Return the clock of this process."""
    return CpuSeconds()


class Meter:
    """In a process that runs tests: write what the tests of a file took one after the other, what the process took in
    all, and the loop. The clock is read where the file changes: read at each test, it took 3 % of all."""

    def __init__(self, folder: Path):
        self._path = Path(tempfile.mkstemp(dir=folder)[1])
        self._next = 0.0
        self._file = ""
        self._before = 0.0

    def _write(self, name: str, seconds: float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([name, seconds]) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        if (file := file_of(item)) != self._file:
            self._begin(file)
        try:
            return (yield)
        finally:
            if nextitem is None or file_of(nextitem) != file:
                self._write(file, clock().now() - self._before)
                self._file = ""

    def _begin(self, file: str) -> None:
        if time.monotonic() > self._next:
            self._write("loop", loop(time.process_time))
            self._next = time.monotonic() + LOOPS
        self._file, self._before = file, clock().now()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._write("all", clock().now())


def configure(config: Any) -> None:
    """Begin to measure where pytest was asked to, in each process that runs tests."""
    if not config.option.cpu_seconds:
        return
    if not hasattr(config, "workerinput"):  # that of another run, of which this one is a test, stays as it is
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="dtgpt-cpu-")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        clock()
        config.pluginmanager.register(Meter(Path(os.environ[FOLDER])))


def finish(config: Any) -> None:
    """Write the file, in the process that has started the others."""
    if config.option.cpu_seconds and not hasattr(config, "workerinput"):
        folder = Path(os.environ.pop(FOLDER))
        found = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
        Path(config.option.cpu_seconds).write_text("\n".join(report(found)) + "\n")
        shutil.rmtree(folder)


def report(found: Iterable[tuple[str, float]]) -> list[str]:
    """Return the lines of the file. found: seconds of files, of "loop", and of "all" that a process took."""
    files, loops, whole = Counter[str](), [], 0.0
    for name, seconds in found:
        if name == "loop":
            loops.append(seconds)
        elif name == "all":
            whole += seconds
        else:
            files[name] += seconds
    mean, tests = sum(loops) / max(1, len(loops)), files.total()
    lines = [
        f"{tests:.1f} CPU seconds of tests, and {max(0.0, whole - tests):.1f} between them (imports, collection)",
        f"loop of {mean:.4f} s; at that of {REFERENCE} s of the marks: {tests * REFERENCE / (mean or REFERENCE):.1f}",
    ]
    return lines + [f"{seconds:8.1f}  {name}" for name, seconds in files.most_common()]


def children_of(pid: int) -> list[int]:
    """Return the processes that the threads of one have started. Reads of no other process: after each test, a walk
    over all of a machine took longer than most tests."""
    found: list[int] = []
    with suppress(OSError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process, with those of children that it waited for."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / TICK
    return 0.0


def _note_starts(own: set[int]) -> None:
    """Add each process that this one starts from now on to `own`."""

    def wrap(holder: Any, name: str, pid_of: Any) -> None:
        function = getattr(holder, name)

        def start(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            own.add(pid_of(result, args))
            return result

        setattr(holder, name, start)

    wrap(os, "fork", lambda pid, _: pid)
    wrap(os, "forkpty", lambda pair, _: pair[0])
    wrap(subprocess.Popen, "_execute_child", lambda _, args: args[0].pid)
    wrap(util, "spawnv_passfds", lambda pid, _: pid)
