"""What a checkpoint must be to be believed: whoever wrote to its files, nothing in them is used before it was checked.

A file has its size and digest in `state.json`, and that has its own digest; entries are of their kinds; the header of a
file contradicts neither itself nor the file. So a damaged checkpoint is told, and an older one takes its place.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtgpt.checkpoint.manifest import READERS, digest_of, text_of
from dtgpt.checkpoint.shard_file import Damaged, Verification, Written, piece_of
from dtgpt.models.config import ModelConfig
from dtgpt.util import seams
from dtgpt.util.errors import shown, shown_name
from dtgpt.util.machine.threads import Threads
from dtgpt.util.storage import open_regular

COUNT = range(1 << 62)
# Of what type an entry of `state.json` is, or in which range a whole number.
REQUIRED: dict[str, type | range] = {
    "step": COUNT,
    "consumed_samples": COUNT,
    "updates": COUNT,
    "tokens": COUNT,
    "data_digest": str,
    "versions": dict,
    "files": dict,
}
OPTIONAL: dict[str, type | range] = {"plan": str, "world": int, "origin": str, "recipe": dict, "optimizer": str}
FILE_NAME = re.compile(r"(weights|optimizer)-\d{5,}-\d{3,}\.safetensors")
LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
LARGEST_RANK = 8
LARGEST_SIZE = 1 << 62


class Verified(Verification):
    """All of it is checked."""

    def text(self, state: dict[str, Any], digest: str, text: str) -> None:
        if digest != digest_of(state) or text_of(state | {"digest": digest}) != text:
            raise ValueError("its digest is another one")

    def state(self, state: dict[str, Any], config: ModelConfig) -> None:
        config.validate()
        for name, kind in REQUIRED.items():
            _check_entry(name, state[name], kind)
        for name, kind in OPTIONAL.items():
            if name in state:
                _check_entry(name, state[name], kind)
        for name, version in state["versions"].items():
            _check_entry(f"the version of {shown_name(name)}", version, str)
        if state["updates"] > state["step"]:
            raise ValueError(f"{state['updates']} updates are more than the steps")
        # Entries of states are checked also where the run that reads them has no such state.
        for name, check in seams.added("entries").items():
            if name in state:
                seams.load(check)(state[name], config)
        for name, file in state["files"].items():
            # Before anything uses the name as a path: it may lead out of the folder.
            if not FILE_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is not the name of a file of a checkpoint")
            _check_entry(f"bytes of {name}", file["bytes"], int)
            _check_entry(f"sha256 of {name}", file["sha256"], str)

    def damage(self, folder: Path, files: list[tuple[str, Written]]) -> str | None:
        with Threads(READERS) as pool:
            found = list(pool.map(lambda item: find_damage(folder / item[0], item[1]), files))
        return next((str(damage) for damage in found if damage), None)

    def length(self, length: int, size: int) -> None:
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"its header would have {length} bytes, the file has {size}")

    def header(self, table: dict, where: dict, data: int, size: int) -> None:
        if sorted(where) != sorted(table):
            raise ValueError("its tensors are not those of its metadata")
        ends = [_end_of(name, table[name], where[name], data, size) for name in table]
        for name, before in zip(table, [0, *ends], strict=False):
            if table[name]["data_offsets"][0] != before:
                raise ValueError(f"{shown_name(name)} does not begin where the tensor before it ends")

    def are_disjoint(self, parts: Sequence[tuple[range, ...]]) -> bool:
        """Return whether no element is in two of the rectangles: an element that is there twice could hide a missing
        one."""
        if not parts:  # of a rank that holds nothing of a small tensor
            return True
        bounds = np.array([[(r.start, r.stop) for r in part] for part in parts]).reshape(len(parts), -1, 2)
        begin, end = bounds[..., 0], bounds[..., 1]
        meet = ((begin[:, None] < end[None]) & (begin[None] < end[:, None])).all(axis=-1)
        return meet.sum() == len(parts)  # each meets itself


def _check_entry(name: str, value: Any, kind: type | range) -> None:
    """Raise ValueError where a value is not of a type, or not a whole number in a range. True is no number."""
    if isinstance(kind, range):
        if type(value) is not int or value not in kind:
            raise ValueError(f"{name}={shown(value)} must be a whole number from {kind.start} on")
    elif type(value) is not kind:
        raise ValueError(f"{name}={shown(value)} must be of type {kind.__name__}")


def _end_of(name: str, entry: dict, where: dict, data: int, size: int) -> int:
    """Return where the values of a tensor end, counted from `data`, where those of all begin."""
    piece = piece_of(name, entry, where)
    begin, end = entry["data_offsets"]
    numbers = (*piece.shape, *piece.offset, *piece.size, begin, end)
    if not all(type(n) is int and 0 <= n < LARGEST_SIZE for n in numbers) or not 1 <= len(piece.shape) <= LARGEST_RANK:
        raise ValueError(f"{shown_name(name)} has impossible sizes")
    if not len(piece.shape) == len(piece.offset) == len(piece.size) or any(
        r.stop > n for r, n in zip(piece.part, piece.shape, strict=True)
    ):
        raise ValueError(f"{shown_name(name)} is not a part of a tensor of shape {shown(piece.shape)}")
    if entry["dtype"] != "F32" or end - begin != piece.num_bytes or data + end > size:
        raise ValueError(f"{shown_name(name)} does not lie in the file as its header says")
    return end


def find_damage(path: Path, expected: Written) -> Damaged | None:
    """Return what is wrong with a file that is not, byte for byte, the one that was written."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != expected.num_bytes:
                return Damaged(path, f"it has {size} bytes, {expected.num_bytes} were written")
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return Damaged(path, error.strerror)
    if found != expected.sha256:
        return Damaged(path, f"its sha256 is {found[:12]}..., {expected.sha256[:12]}... was written")
    return None
