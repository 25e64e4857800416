"""Signals of a server, and the end of one that hangs."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from dtgpt.run.stops.signals import IMPATIENT, STOPPING
from dtgpt.serve.log import takes
from dtgpt.serve.worker import EngineWorker
from dtgpt.util.console import say_error

LAST = 30.0  # seconds after those of running requests when the process is ended: connections have eight of them
SILENT = 60.0  # seconds that a step or a ping may take before a rank counts as failed


class EndBySignal:
    """From `install` to the end of the process, the first SIGINT, SIGTERM or SIGHUP drains the worker, and a second one
    ends the process at once, as does an alarm where it does not end in time. On ranks without a worker the first one
    does nothing else: rank 0 ends them.

    Under torchrun, which passes Ctrl-C on, a signal within two seconds of the first is the same one.
    """

    def __init__(self, worker: EngineWorker | None, seconds: float):
        """seconds: that running requests have to end."""
        self._worker, self._seconds = worker, seconds
        self._first: float | None = None

    def install(self) -> None:
        """Handle the signals that the process was not started to ignore, as it is under nohup."""
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process whatever its threads do
            signal.setitimer(signal.ITIMER_REAL, self._seconds + LAST)
            if self._worker is not None:
                name = signal.Signals(number).name
                text = f"\n{name}: ending; running requests have {self._seconds:g} s; again to end at once\n"
                with suppress(OSError):  # the reader of stderr may have gone with the same signal
                    if takes(2):
                        os.write(2, text.encode())
                self._worker.drain(self._seconds)
        elif "TORCHELASTIC_RUN_ID" not in os.environ or now - self._first > IMPATIENT:
            os._exit(128 + number)


def end_where_a_rank_is_silent(worker: EngineWorker, seconds: float = SILENT) -> None:
    """End the process where a step or a ping of the engine takes more than `seconds`: another rank does not answer,
    and the thread of the engine cannot be interrupted."""
    if worker.seconds_under_way() > seconds:
        cause = f"no rank has finished a step for {seconds:g} s; start all of them again"
        say_error(f"dtgpt: {cause}")
        worker.abandon(cause)
