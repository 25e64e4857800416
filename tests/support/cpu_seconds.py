"""Seconds that tests take on CPUs, those of all their processes counted. `--cpu-seconds FILE` writes them.

Pools and programs of tests are children of a fork server, for which pytest does not wait, so that `time` does not see
them. Here the descendants that live are asked (/proc), and those whose parent has ended come to this process
(PR_SET_CHILD_SUBREAPER), which waits for them. Linux only.
"""

import ctypes
import os
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
TICK = os.sysconf("SC_CLK_TCK")
PAUSE = 0.2  # seconds between two looks for processes whose parent has ended


class CpuSeconds:
    """A clock of the CPU time of this process and of all that descend from it."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "this process cannot wait for those whose parent has ended")
        self._own = set(processes()[0].get(os.getpid(), ()))  # this process has started them, and waits for them
        self._lock = threading.Lock()
        _note_starts(self._own)
        threading.Thread(target=self._wait_for_orphans, daemon=True).start()

    def now(self) -> float:
        """Return the seconds up to now: of this process, of ended children that were waited for, of living ones."""
        with self._lock:
            children, seconds = processes()
            found, waiting = sum(os.times()[:4]), list(children.get(os.getpid(), ()))
            while waiting:
                pid = waiting.pop()
                found += seconds[pid]
                waiting += children.get(pid, ())
            return found

    def _wait_for_orphans(self) -> None:
        foreign: set[int] = set()
        while True:
            time.sleep(PAUSE)
            with self._lock:
                seen = set(processes()[0].get(os.getpid(), ())) - self._own
                for pid in seen & foreign:  # seen twice: what has just been started may not be in `_own` yet
                    with suppress(ChildProcessError):
                        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)  # its time becomes that of waited children
                foreign = seen


def processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the children of each process, and each one's CPU seconds with those of children that it waited for."""
    children, seconds = defaultdict(list), {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(pid)
            seconds[pid] = sum(map(int, fields[11:15])) / TICK
    return children, seconds


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
