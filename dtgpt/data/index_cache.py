"""Arrays that take long to compute, kept on disk under a hash of what they were computed from.

`<cache>/index-<hash>/` holds one .npy an array and a list of their sizes and checksums. A folder of that name is
whole, unless a disk lost part of it: what does not match the list is computed again. Any number of processes may do so
at once.
"""

import hashlib
import json
import os
import platform
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dtgpt.errors import UserError
from dtgpt.storage import parse_json, sync_path, write_text

CACHE_FORMAT = 1  # raise when the same settings would give other arrays
CONTENTS = "contents.json"
CHUNK = 1 << 24  # bytes


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
) -> dict[str, np.ndarray]:
    """The arrays that `build` returns for these `settings` (whatever JSON can tell), mapped read-only. Raises UserError
    where they cannot be written."""
    text = json.dumps({"format": CACHE_FORMAT, **settings}, sort_keys=True, default=int)
    folder = cache / f"index-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    arrays = _load(folder)
    if arrays is None:
        _write(folder, build())
        arrays = _load(folder)
    if arrays is None:
        raise UserError(f"{folder} does not hold what was just written; free or change the disk, or set DTGPT_CACHE")
    return arrays


def _load(folder: Path) -> dict[str, np.ndarray] | None:
    """None where there is nothing, or not what was written."""
    try:
        contents = parse_json((folder / CONTENTS).read_text(encoding="utf-8"))
        for name, written in contents.items():
            if _checksum(folder / f"{name}.npy") != written:
                return None
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in contents} or None
    except (OSError, ValueError, AttributeError, EOFError):
        return None


def _checksum(path: Path) -> list[int]:
    """Bytes and CRC-32. Read, not mapped: pages of a mapping would count as memory of this process."""
    size, value = 0, 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            size, value = size + len(chunk), zlib.crc32(chunk, value)
    return [size, value]


def _write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write beside `folder` and rename; what was there, damaged, goes away."""
    mark = f"{folder.name}-{platform.node()}-{os.getpid()}"
    partial, old = folder.with_name(f"partial-{mark}"), folder.with_name(f"damaged-{mark}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        write_text(partial / CONTENTS, json.dumps({name: _checksum(partial / f"{name}.npy") for name in arrays}))
        sync_path(partial)
        _exchange(partial, folder, old)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(
            f"the index of samples cannot be cached in {folder.parent} ({error}); free space there, or set "
            "DTGPT_CACHE to another folder"
        ) from None
    finally:
        for path in (partial, old):
            shutil.rmtree(path, ignore_errors=True)


def _exchange(partial: Path, folder: Path, old: Path) -> None:
    """Give `partial` its name, unless another process was faster with the same content."""
    if folder.exists() and _load(folder) is None:
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if _load(folder) is None:
            raise
