"""safetensors files that hold pieces of larger tensors, and what a rank copies to the host's memory to write them.

A tensor in a file is a rectangle of a parameter; the file's metadata, under `PIECES`, tells the shape of the whole and
where the rectangle begins. Any reader of safetensors opens such a file. dtgpt writes and reads them itself, because it
needs the digest while it writes, a sync at the end, a header that is checked before it is believed, and slices of
slices straight into their place."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtgpt.models.config import ModelConfig
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.shards import Shards
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.storage import open_regular

PIECES = "dtgpt.pieces"  # metadata: {tensor name: {"shape": of the whole, "offset": where the piece begins}}, as JSON
CHUNK = 1 << 23  # bytes hashed and written at a time, in between which other threads may run
LONGEST_REASON = 300  # characters of what a foreign file may have made long


class Damaged(UserError):
    """A file of a checkpoint is not what was written."""

    def __init__(self, path: Path, reason: object):
        super().__init__(f"{path} is damaged ({str(reason)[:LONGEST_REASON]})")


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, fp32."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "Piece":
        """Return the piece that is all of a tensor."""
        return cls(name, shape, (0,) * len(shape), shape)

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.size)

    @property
    def part(self) -> tuple[range, ...]:
        """Return the global indices."""
        return tuple(range(begin, begin + n) for begin, n in zip(self.offset, self.size, strict=True))


@dataclass(frozen=True)
class Written:
    """What a file must be when it is read again."""

    num_bytes: int
    sha256: str


def write_file(path: Path, pieces: list[Piece], data: Tensor) -> Written:
    """Write the pieces, whose elements lie one after another in `data` (fp32, on the CPU), and wait until they are on
    the disk. Raises OSError."""
    header = _header(pieces)
    digest = hashlib.sha256()
    values = data.numpy().astype("<f4", copy=False).data.cast("B")
    with path.open("xb") as file:
        for block in (memoryview(header), values):
            for begin in range(0, len(block), CHUNK):
                digest.update(block[begin : begin + CHUNK])
                file.write(block[begin : begin + CHUNK])
        file.flush()
        os.fsync(file.fileno())
    return Written(len(header) + len(values), digest.hexdigest())


def _header(pieces: list[Piece]) -> bytes:
    """Return the length of the JSON and the JSON, filled up with blanks so that the data is aligned."""
    where = {p.name: {"shape": p.shape, "offset": p.offset} for p in pieces}
    table: dict[str, object] = {"__metadata__": {PIECES: json.dumps(where)}}
    begin = 0
    for piece in pieces:
        table[piece.name] = {"dtype": "F32", "shape": piece.size, "data_offsets": [begin, begin + piece.num_bytes]}
        begin += piece.num_bytes
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Verification:
    """What of a checkpoint is looked at before it is believed. Here nothing is; a capability holds all of it against
    what was written. Each method raises ValueError, TypeError or KeyError for what was not."""

    def text(self, state: dict[str, Any], digest: str, text: str) -> None:
        """Check a text of `state.json`, which says all of `state`, and last its `digest`."""

    def state(self, state: dict[str, Any], config: ModelConfig) -> None:
        """Check the entries of a state, which has a model of this configuration."""

    def damage(self, folder: Path, files: list[tuple[str, Written]]) -> str | None:
        """Return what is wrong with files that are not, byte for byte, those that were written."""

    def length(self, length: int, size: int) -> None:
        """Check how long the header of a file says to be that has `size` bytes."""

    def header(self, table: dict, where: dict, data: int, size: int) -> None:
        """Check a header: the tensors of a file of `size` bytes, and where each lies in its whole. `data`: where their
        values begin."""

    def are_disjoint(self, parts: Sequence[tuple[range, ...]]) -> bool:
        """Return whether no element is in two of the rectangles."""
        return True


def verification() -> Verification:
    """Return what checkpoints are held against."""
    return next(iter(seams.listed("verifications")), Verification)()


def read_header(path: Path) -> list[tuple[Piece, int]]:
    """Return (piece, position of its data in the file) of a file. Raise Damaged where it is none."""
    try:
        with open_regular(path) as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            verification().length(length, size)
            table = json.loads(file.read(length))
        where = json.loads(table.pop("__metadata__")[PIECES])
        verification().header(table, where, 8 + length, size)
        return [
            (piece_of(name, entry, where[name]), 8 + length + entry["data_offsets"][0]) for name, entry in table.items()
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(path, f"{type(error).__name__}: {error}") from None


def piece_of(name: str, entry: dict, where: dict) -> Piece:
    """Return the piece of which a header has an entry, and says where it lies in its whole."""
    return Piece(name, tuple(where["shape"]), tuple(where["offset"]), tuple(entry["shape"]))


def copy_overlap(path: Path, piece: Piece, position: int, part: tuple[range, ...], target: Tensor) -> int:
    """Copy what the file's piece has of the elements `part` of the whole tensor to their place in `target`, which holds
    `part`; returns how many. Only the pages that are needed are read."""
    both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(piece.part, part, strict=True)]
    count = math.prod(map(len, both))
    if count:
        try:
            stored = np.memmap(path, "<f4", "c", position, piece.size)  # "c": torch wants to be able to write
        except (OSError, ValueError) as error:  # gone or cut short since its header was read
            raise Damaged(path, error) from None
        source = stored[_within(both, piece.part)]
        target[_within(both, part)].copy_(torch.from_numpy(source.view(np.ndarray)))
    return count


def _within(inner: Iterable[range], outer: Iterable[range]) -> tuple[slice, ...]:
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))


def by_size(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Yield the pieces in their order, as lists of at most `limit` bytes each, or of one piece."""
    found: list[Piece] = []
    total = 0
    for piece in pieces:
        if found and total + piece.num_bytes > limit:
            yield found
            found, total = [], 0
        found.append(piece)
        total += piece.num_bytes
    if found:
        yield found


# Bytes of data, so that several files are hashed and written at a time. Pinned memory comes in powers of two.
FILE_LIMIT = 1 << 29


@dataclass
class ShardFile:
    """One file of this rank: its pieces, and where their values are in training."""

    name: str
    pieces: list[Piece]
    values: list[Tensor]

    @property
    def numel(self) -> int:
        return sum(value.numel() for value in self.values)

    def copy_to(self, data: Tensor) -> None:
        """Queue copies of all values to the host, one after another."""
        for place, value in zip(data.split([v.numel() for v in self.values]), self.values, strict=True):
            place.view(value.shape).copy_(value, non_blocking=True)

    def write_at_once(self, folder: Path) -> Written:
        """Write by way of memory for this file alone, which is freed afterwards."""
        data = torch.empty(self.numel)
        self.copy_to(data)
        if self.values[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        return write_file(folder / self.name, self.pieces, data)


def files_of(shards: Shards, optimizer: Optimizer) -> Iterator[ShardFile]:
    """Yield the files that this rank writes: of each shard the rows that this rank owns among its replicas."""
    weights = {"": {shard.index: shard.local for shard in shards}}  # suffix of the names -> tensors by index of shard
    states: dict[str, dict[int, Tensor]] = {}
    for shard in shards:
        for name, tensor in optimizer.state(shard.index).items():
            states.setdefault(f".{name}", {})[shard.index] = tensor
    for kind, tensors in (("weights", weights), ("optimizer", states)):
        values: dict[str, Tensor] = {}
        pieces = []
        for suffix, by_index in tensors.items():
            for index, tensor in by_index.items():
                shard = shards.all[index]
                shape, region = shard.place_of(tensor)
                part, rows = shard.own if region == shard.region else (region, slice(None))
                if all(map(len, part)):
                    offset, size = tuple(r.start for r in part), tuple(map(len, part))
                    pieces.append(Piece(shard.name + suffix, shape, offset, size))
                    values[pieces[-1].name] = tensor[rows]
        for number, group in enumerate(by_size(pieces, FILE_LIMIT)):
            name = file_name(kind, shards.mesh.rank, number)
            yield ShardFile(name, group, [values[p.name] for p in group])


def file_name(kind: str, rank: int, number: int) -> str:
    return f"{kind}-{rank:05d}-{number:03d}.safetensors"
