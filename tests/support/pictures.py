"""Runs without the picture at their end: matplotlib draws for a tenth of a second, as long as a tiny run trains.

Tests of the picture itself are marked `picture`; real processes, which do not come from here, draw as well.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

PLACE = "dtgpt.charts.observers.plot_runs"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_signature(runs: list[Path], output: Path) -> None:
    """Stand in for `plot_runs`: leave a file in the picture's place."""
    output.write_bytes(SIGNATURE)


@functools.cache
def what_draws() -> Any:
    """Return the function that draws, as it was before the first `no_pictures`; None where nothing draws, since charts
    are deleted (tests/support/deleted.py)."""
    try:
        from dtgpt.charts.observers import plot_runs
    except ImportError:
        return None
    return plot_runs


def no_pictures() -> AbstractContextManager:
    """Return a context in which runs leave a file in place of their picture."""
    return _drawn_by(write_signature)


def pictures() -> AbstractContextManager:
    """Return a context in which runs draw although `no_pictures` is in effect."""
    return _drawn_by(what_draws())


def _drawn_by(function: Any) -> AbstractContextManager:
    return mock.patch(PLACE, function) if what_draws() else nullcontext()
