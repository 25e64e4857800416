"""Indices that take long to compute, kept on disk under a hash of what they were computed from:
`<cache>/index-<hash>/`, as `array_cache` keeps arrays."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dtgpt.data.array_cache import load_or_make
from dtgpt.data.file_array import FileArray
from dtgpt.util.errors import UserError

CACHE_FORMAT = 1  # raise when the same settings would give other arrays


def check_memory(num_bytes: int, what: str) -> None:
    """Raise UserError where arrays of so many bytes cannot be in this machine's memory. `what` needs them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > total:
        raise UserError(
            f"{what} takes {num_bytes:,} bytes while its index is built, and this machine has "
            f"{total:,}; ask for fewer samples"
        )


def cached(
    cache: Path, settings: Mapping[str, object], build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, FileArray]:
    """The arrays that `build` returns for these `settings` (whatever JSON can tell). Raises UserError where they cannot
    be written."""
    text = json.dumps({"format": CACHE_FORMAT, **settings}, sort_keys=True, default=int)
    folder = cache / f"index-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return load_or_make(folder, "the index of samples", build)
