"""Signals, and the loss of the launcher: requests that the training loop meets after its next step.

A job on a cluster is ended by SIGTERM, with some seconds until SIGKILL; a user presses Ctrl-C, once or often; a
terminal is closed. A step that is cut short leaves ranks that wait for each other, and no checkpoint. So a signal only
leaves a note here, and the loop ends all ranks after the same step.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from dtgpt.run.stop_request import StopRequest

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal was closed
IMPATIENT = 2.0  # seconds; torchrun passes one Ctrl-C on as a second signal within this time
LAUNCHER = os.getppid()  # taken early: this module is imported before torch
_entered: list["Signals"] = []
_masks: list[set[int | signal.Signals]] = []  # of signals that waited before a fork
when_stopped: list[Callable[[], object]] = []  # what is called when a run hears no signals any more


class Signals(StopRequest):
    """While it is entered as a context, `requested` becomes the signal number once SIGINT, SIGTERM or SIGHUP has
    arrived, unless the process was started to ignore it, as under nohup.

    A further SIGINT or SIGTERM, more than two seconds later, ends the process at once. A process that is forked
    meanwhile, as those of a `multiprocessing.Pool`, takes signals as before: its end does not wait for a step.
    """

    _first = 0.0  # when the first one came

    def __enter__(self) -> "Signals":
        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._handle) for number in heard}
        _entered.append(self)
        return self

    def __exit__(self, *exception) -> None:
        _entered.remove(self)
        self.restore_handlers()
        for call in when_stopped:
            call()

    def restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, number: int) -> None:
        if self.requested is None:
            super().ask(number)
            self._first = time.monotonic()
            name = signal.Signals(number).name
            with suppress(OSError):  # the reader of stderr may have gone with the same signal
                os.write(2, f"\n{name}: ending after this step with a checkpoint; again to end at once\n".encode())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.ask(number)
        elif number != signal.SIGHUP and time.monotonic() - self._first > IMPATIENT:
            os._exit(128 + number)


def _block() -> None:
    """Let signals wait while a process is forked: Python forgets one that comes before the child's handlers are those
    of before, which would then never end."""
    if _entered:
        _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING))


def _unblock() -> None:
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _restore_in_child() -> None:
    while _entered:
        _entered.pop().restore_handlers()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)
