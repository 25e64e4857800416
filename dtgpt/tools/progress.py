"""Lines of progress of commands that work for long."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

COLUMNS = 79
LAP = 1.0, 10.0  # seconds between two lines of progress, on a terminal and in a log


class ProgressLines:
    """Lines of progress on stderr: on a terminal one that is renewed."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._begin = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return max(time.monotonic() - self._begin, 1e-9)

    def say_at_times(self, text: Callable[[], str]) -> None:
        """Write a line, unless the last one is recent."""
        now = time.monotonic()
        if now - self._last >= LAP[not self._terminal]:
            self._last = now
            self.say(text(), "\r" if self._terminal else "\n")

    def say(self, text: str, end: str = "\n") -> None:
        """Write a line; where nobody reads stderr, nothing."""
        with suppress(OSError):
            sys.stderr.write((text.ljust(COLUMNS) if end == "\r" else text) + end)  # over a longer line before
            sys.stderr.flush()
