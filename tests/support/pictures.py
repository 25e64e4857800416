"""Runs without the picture at their end: matplotlib draws for a tenth of a second, as long as a tiny run trains.

Tests of the picture itself are marked `picture`; real processes, which do not come from here, draw as well.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_signature(runs: list[Path], output: Path) -> None:
    """Stand in for `plot_runs`: leave a file in the picture's place."""
    output.write_bytes(SIGNATURE)


def no_pictures() -> AbstractContextManager:
    """Return a context in which runs leave a file in place of their picture."""
    try:
        import dtgpt.charts.observers  # noqa: F401
    except ImportError:  # deleted, see tests/support/deleted.py: nothing draws
        return nullcontext()
    return mock.patch("dtgpt.charts.observers.plot_runs", write_signature)
