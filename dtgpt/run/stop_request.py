"""Requests to end a run before its last step, which the loop meets after its next step.

A step that is cut short leaves ranks that wait for each other, and no checkpoint. So who asks leaves a note here, and
the loop ends all ranks after the same step. Here nobody asks but by `ask`; capabilities hear signals, and know limits.
"""

from typing import Any, Self

from dtgpt.util import seams


class StopRequest:
    """A context in which somebody may ask. It is true from then on. `requested`: the number of the signal that asked,
    if one did. `reason`: why the run ends in order without a signal, as a sentence goes on; empty: it does not."""

    reason = ""

    def __new__(cls, recipe: Any = None) -> Self:
        return super().__new__(seams.with_kinds("stops", cls, recipe) if cls is StopRequest else cls)

    def __init__(self, recipe: Any = None) -> None:
        """recipe: of the run, whose time counts from here."""
        self.requested: int | None = None

    def __bool__(self) -> bool:
        return self.requested is not None

    def ends_after(self, step: int, steps: int) -> bool:
        """Return whether a run of `steps` is to end after this one, the same on every rank."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Hear no requests any more."""

    def ask(self, number: int) -> None:
        """Take the signal `number` as arrived; a further one changes nothing."""
        if self.requested is None:
            self.requested = number
