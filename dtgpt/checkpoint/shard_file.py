"""safetensors files that hold pieces of larger tensors, and what a rank copies to the host's memory to write them.

A tensor in a file is a rectangle of a parameter; the file's metadata, under `PIECES`, tells the shape of the whole and
where the rectangle begins. Any reader of safetensors opens such a file. dtgpt writes and reads them itself, because it
needs the digest while it writes, a sync at the end, a header that is checked before it is believed, and slices of
slices straight into their place."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.shards import Shards
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import open_regular

PIECES = "dtgpt.pieces"  # metadata: {tensor name: {"shape": of the whole, "offset": where the piece begins}}, as JSON
CHUNK = 1 << 23  # bytes hashed and written at a time, in between which other threads may run
LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
LARGEST_RANK = 8
LARGEST_SIZE = 1 << 62
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


def read_header(path: Path) -> list[tuple[Piece, int]]:
    """Return (piece, position of its data in the file) of a file. Raise Damaged where the header contradicts itself or
    the file: nothing in it is believed before."""
    try:
        with open_regular(path) as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LARGEST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            table = json.loads(file.read(length))
        where = json.loads(table.pop("__metadata__")[PIECES])
        if sorted(where) != sorted(table):
            raise ValueError("its tensors are not those of its metadata")
        found = [_entry(name, table[name], where[name], 8 + length, size) for name in table]
        expected = 8 + length
        for piece, position in found:
            if position != expected:
                raise ValueError(f"{shown_name(piece.name)} does not begin where the tensor before it ends")
            expected += piece.num_bytes
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(path, f"{type(error).__name__}: {error}") from None


def _entry(name: str, entry: dict, where: dict, data: int, size: int) -> tuple[Piece, int]:
    piece = Piece(name, tuple(where["shape"]), tuple(where["offset"]), tuple(entry["shape"]))
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
    return piece, data + begin


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
