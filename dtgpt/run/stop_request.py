"""Requests to end a run before its last step, which the loop meets after its next step.

A step that is cut short leaves ranks that wait for each other, and no checkpoint. So who asks leaves a note here, and
the loop ends all ranks after the same step. Here it is the end of the time that asks; a capability hears signals.
"""

import math
import time
from typing import Any, Self

from dtgpt.util import seams


class StopRequest:
    """A context in which somebody may ask. It is true from then on, and from the end of its time. `requested`: the
    number of the signal that asked, if one did."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        return super().__new__(seams.with_kinds("stops", cls) if cls is StopRequest else cls)

    def __init__(self, minutes: float | None = None) -> None:
        """minutes: from now to the end; None: no end."""
        self.requested: int | None = None
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def __bool__(self) -> bool:
        return self.requested is not None or time.monotonic() >= self._end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Hear no requests any more."""

    def ask(self, number: int) -> None:
        """Take the signal `number` as arrived; a further one changes nothing."""
        if self.requested is None:
            self.requested = number
