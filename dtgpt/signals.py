"""Ctrl-C, SIGTERM and the end of the time as a request that the training loop meets at the next step boundary."""

import math
import os
import signal
import time
from contextlib import suppress
from types import FrameType

IMPATIENT = 2.0  # seconds; torchrun passes one Ctrl-C on as a second signal within this time


class StopRequest:
    """While it is entered as a context, `requested` becomes the signal number once SIGINT or SIGTERM has arrived. It is
    true from then on, and from the end of its time.

    A further signal, more than two seconds later, ends the process at once.
    """

    def __init__(self, minutes: float | None = None) -> None:
        """minutes: from now to the end; None: no end."""
        self.requested: int | None = None
        self._first = 0.0
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def __bool__(self) -> bool:
        return self.requested is not None or time.monotonic() >= self._end

    def __enter__(self) -> "StopRequest":
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._first = number, time.monotonic()
            name = signal.Signals(number).name
            with suppress(OSError):  # the reader of stderr may have gone with the same Ctrl-C
                os.write(2, f"\n{name}: ending after this step with a checkpoint; again to end at once\n".encode())
        elif time.monotonic() - self._first > IMPATIENT:
            os._exit(128 + number)
