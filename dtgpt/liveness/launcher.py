"""The processes of a run on this machine, started by `dtgpt train RECIPE.py --nproc N` in place of torchrun."""

import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from subprocess import Popen
from types import FrameType
from typing import Annotated, ClassVar

from dtgpt.util.console import say_error
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.peers import VARIABLES, Process
from dtgpt.util.seams import Launch

POLL = 0.05  # seconds between two looks at the processes
SAID = 1.0  # seconds after rank 0 said why the run ends until the others get SIGTERM
GRACE = 10.0  # the same after another failure: the others notice and name it
PATIENCE = 30.0  # seconds from SIGTERM to SIGKILL
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFUSED = 2  # exit code of a process that said in one sentence why it ends
SIGNALLED = 128  # exit codes from here on: of a process that heard a signal, and said so
MOST = 1024  # processes on a machine


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Launch):
    aliases: ClassVar[dict[str, str]] = {"nproc_per_node": "nproc"}

    nproc: Annotated[
        int | None,
        "number of processes to start on this machine; none: one, or those of torchrun",
        Bounds(1, MOST),
    ] = None

    @property
    def next_word(self) -> str:
        return "" if self.nproc or is_started() else "--nproc"

    def start(self, words: list[str], check: Callable[[int], object]) -> int | None:
        if is_started():
            number = Process.from_environment().local_world
            if self.nproc not in (None, number):
                raise UserError(
                    f"--nproc is {self.nproc}, but another launcher, such as torchrun, started {number} processes on "
                    "this machine; leave --nproc out"
                )
            return None
        if self.nproc is None or self.nproc == 1:
            return None
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the processes say it again
            check(self.nproc)
        return launch(words, self.nproc)


def is_started() -> bool:
    """Return whether a launcher has started this process."""
    return any(name in os.environ for name in VARIABLES.values())


def launch(words: list[str], number: int) -> int:
    """Run `python WORDS` in `number` processes that form one run, and return the exit code: 0, or that of the first
    that failed. SIGINT, SIGTERM and SIGHUP are passed on. Raises UserError where the processes cannot be started."""
    import torch.distributed as dist

    # The store is in this process, as torchrun's is: its port is free for certain, and it outlives each rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    return Children(words, number, store.port).run()


def environment(rank: int, number: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, by torchrun's names."""
    from dtgpt.util.shared.environment import child_environment

    own = {
        "RANK": rank,
        "WORLD_SIZE": number,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "dtgpt",
    }
    return {"OMP_NUM_THREADS": "1", **child_environment(), **{name: str(value) for name, value in own.items()}}


class Children:
    """The processes of a run, by rank."""

    def __init__(self, words: list[str], number: int, port: int):
        self.words, self.number, self.port = words, number, port
        self.started: list[Popen] = []
        self.heard: int | None = None  # the first signal that arrived

    def run(self) -> int:
        """Start all and wait for them; return the exit code."""
        heard = [one for one in PASSED_ON if signal.getsignal(one) is not signal.SIG_IGN]
        previous = {one: signal.signal(one, self._pass_on) for one in heard}
        try:
            self._start()
            failure = self._first_failure()
            if failure is not None:
                self._end(self._grace(failure))
        except BaseException:
            self._end(0)
            raise
        finally:
            for one, handler in previous.items():
                signal.signal(one, handler)
        return 0 if failure is None else self._tell(*failure)

    def _start(self) -> None:
        for rank in range(self.number):
            try:
                words = [sys.executable, *self.words]
                child = Popen(words, env=environment(rank, self.number, self.port))
            except OSError as error:
                raise UserError(
                    f"process {rank + 1} of {self.number} cannot be started ({error.strerror}); use a smaller --nproc"
                ) from None
            self.started.append(child)
            if self.heard is not None:  # before this one could hear it
                child.send_signal(self.heard)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or number
        self._send(number)

    def _send(self, number: int) -> None:
        for child in self.started:
            child.send_signal(number)  # nothing where it has ended

    def _first_failure(self) -> tuple[int, int] | None:
        """Wait until all have ended, or one has failed. Return its rank and exit code, of several one that a signal
        ended; else None."""
        while True:
            codes = {rank: child.poll() for rank, child in enumerate(self.started)}
            if failures := [(code > 0, rank, code) for rank, code in codes.items() if code]:
                return min(failures)[1:]
            if None not in codes.values():
                return None
            time.sleep(POLL)

    def _grace(self, failure: tuple[int, int]) -> float:
        # After a signal all end by themselves, each when its part of the checkpoint is written.
        if self.heard is not None or failure[1] >= SIGNALLED:
            return math.inf
        return SAID if failure == (0, REFUSED) else GRACE

    def _end(self, grace: float) -> None:
        """Wait until all have ended, after `grace` seconds with SIGTERM, and at last with SIGKILL."""
        for seconds, number in ((grace, signal.SIGTERM), (PATIENCE, signal.SIGKILL), (PATIENCE, None)):
            end = time.monotonic() + seconds
            while any(child.poll() is None for child in self.started) and time.monotonic() < end:
                time.sleep(POLL)
            if number is not None:
                self._send(number)

    def _tell(self, rank: int, code: int) -> int:
        """Say how a rank has failed, unless it said so itself, and return the exit code."""
        if code == REFUSED or code >= SIGNALLED or self.heard is not None:
            return code if code > 0 else 128 - code
        name = f"rank {rank} of {self.number} (process {self.started[rank].pid})"
        if code > 0:
            say_error(
                f"dtgpt: {name} has failed with exit code {code}, and the others have ended; see its output above"
            )
            return code
        say_error(
            f"dtgpt: {name} was ended by {signal.Signals(-code).name}, and the others have ended; start again with "
            "--resume auto to go on from the newest checkpoint"
        )
        return 128 - code
