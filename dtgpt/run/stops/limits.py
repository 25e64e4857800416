"""Ends of a run that its recipe sets: after some minutes, or after a step that is a multiple of a number."""

import math
import time
from typing import Any

from dtgpt.run.stop_request import StopRequest


class Limits(StopRequest):
    """True from the end of the time on, too."""

    def __init__(self, recipe: Any = None) -> None:
        super().__init__(recipe)
        self._minutes, self._interval = recipe.exit_after, recipe.exit_interval
        self._end = math.inf if self._minutes is None else time.monotonic() + 60 * self._minutes
        self._leaves = False  # because of the interval

    def __bool__(self) -> bool:
        return super().__bool__() or time.monotonic() >= self._end

    def ends_after(self, step: int, steps: int) -> bool:
        self._leaves = bool(self._interval) and step < steps and step % self._interval == 0
        return self._leaves or super().ends_after(step, steps)

    @property
    def reason(self) -> str:  # type: ignore[override]
        if self._leaves:
            return f" (exit_interval {self._interval})"
        minutes = self._minutes
        return "" if minutes is None else f" after {minutes:g} minute{'' if minutes == 1 else 's'} (exit_after)"
