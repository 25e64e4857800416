"""What libraries in C++ write to stderr, past Python's filters of warnings."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stderr_dropped() -> Iterator[None]:
    """Drop what C++ code writes to stderr inside of the block: Python's filters of warnings do not see it."""
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
