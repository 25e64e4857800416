"""Folders that torch.distributed.checkpoint wrote, read tensor by tensor without running their pickles.

.metadata           a pickle: of every tensor its shape, type and pieces, and where each piece lies
__0_0.distcp        what torch.save made of each piece and of each object of rank 0, one after another
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.checkpoint.verification.verify import Verified
from dtgpt.data.library_tokenizers.unpickler import StandIn
from dtgpt.interop.foreign import reading
from dtgpt.interop.pickles import check_distinct, open_bare_pickle, open_embedded
from dtgpt.models.inventory import Shape
from dtgpt.models.source import Ranges
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import open_regular

METADATA = ".metadata"
FILE_NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)  # within the folder
MOST_READS = 50_000_000  # of .metadata, with which 400 billion parameters of 16 tensor-parallel ranks are described
LARGEST = 1 << 62  # of sizes and positions
LARGEST_RANK = 8


class ByteRange(NamedTuple):
    """Bytes of a file of the folder."""

    file: str
    begin: int
    size: int


class StoredPart(NamedTuple):
    """A rectangle of a tensor, and where it lies."""

    part: tuple[range, ...]
    place: ByteRange


class Stored(NamedTuple):
    """A tensor in the folder. The number of elements of its pieces is that of `shape`."""

    dtype: torch.dtype
    shape: Shape
    pieces: list[StoredPart]


class DistributedFolder:
    """What a folder holds: `tensors` and `objects` by name.

    Opening it reads `.metadata` alone. Raise UserError where that is missing or damaged, leads out of the folder, or
    claims more than the files hold.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / METADATA
        self._checked: set[ByteRange] = set()  # pieces whose checksums are right
        metadata = open_bare_pickle(self.path, MOST_READS)
        with reading(self.path, "copy the whole folder again"):
            fields = _fields(metadata, "Metadata")
            places = dict(map(_placed, _dictionary(fields["storage_data"]).items()))
            self.tensors: dict[str, Stored] = {}
            self.objects: dict[str, ByteRange] = {}
            for name, about in _dictionary(fields["state_dict_metadata"]).items():
                if isinstance(about, StandIn) and about.foreign.endswith(".BytesStorageMetadata"):
                    self.objects[name] = places[name, ()]
                else:
                    self.tensors[name] = _stored(name, about, places)
        _check_places(self.folder, places.values())

    def read(self, name: str, part: Ranges) -> Tensor:
        """Return the elements of a tensor with the global indices `part`, in the type of the file. Raise UserError for
        a damaged file."""
        stored = self.tensors[name]
        target = torch.empty([len(r) for r in part], dtype=stored.dtype)
        if not target.numel():
            return target
        used = []
        for piece in stored.pieces:
            both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(piece.part, part, strict=True)]
            if all(both):
                target[_within(both, part)] = self._piece(name, piece)[_within(both, piece.part)]
                used.append(tuple(both))
        if sum(math.prod(map(len, both)) for both in used) != target.numel() or not Verified().are_disjoint(used):
            raise UserError(f"{self.path} lacks a part of {shown_name(name)}, or has one twice; copy the folder again")
        return target

    def read_object(self, name: str) -> Any:
        """Return an object as `open_pickle` reads it. Raise UserError for a damaged file."""
        place = self.objects[name]
        return open_embedded(self.folder / place.file, place.begin, place.size)

    def _piece(self, name: str, piece: StoredPart) -> Tensor:
        """Return a piece as it lies in the mapped file."""
        file, begin, size = piece.place
        found = open_embedded(self.folder / file, begin, size, check=piece.place not in self._checked)
        self._checked.add(piece.place)
        shape, dtype = tuple(map(len, piece.part)), self.tensors[name].dtype
        if not isinstance(found, Tensor) or found.shape != shape or found.dtype != dtype:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else shown(found)
            raise UserError(
                f"{self.folder / file} holds {what} at byte {begin}, where {self.path} has {dtype} {list(shape)} of "
                f"{shown_name(name)}; copy the folder again"
            )
        return found.detach()


def _due(value: Any, fits: bool, what: str) -> Any:
    """Return a value that `fits`. Raise ValueError for another one, where `what` is due."""
    if not fits:
        raise ValueError(f"it has {shown(value)} where {what} is due")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object of the foreign class `kind`. Raise ValueError for another object."""
    fits = isinstance(value, StandIn) and value.foreign.rpartition(".")[2] == kind and isinstance(value.state, dict)
    return _due(value, fits, kind).state


def _dictionary(value: Any) -> dict[Any, Any]:
    return _due(value, isinstance(value, dict), "a dictionary")


def _sizes(value: Any) -> Shape:
    """Return sizes or offsets. Raise ValueError for impossible ones."""
    sizes = _due(value, isinstance(value, tuple | list) and len(value) <= LARGEST_RANK, "a list of sizes")
    return tuple(map(_size, sizes))


def _size(value: Any) -> int:
    return _due(value, type(value) is int and 0 <= value < LARGEST, "a size or a position")


def _placed(item: tuple[Any, Any]) -> tuple[tuple[str, Shape], ByteRange]:
    """Return ((name, offset), place) of an entry of `storage_data`, where an object has the offset ()."""
    index, info = _fields(item[0], "MetadataIndex"), _fields(item[1], "_StorageInfo")
    file = info["relative_path"]
    _due(file, isinstance(file, str) and FILE_NAME.fullmatch(file) is not None, "the name of a file in the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{file} was transformed ({shown(info['transform_descriptors'])}); save it without transforms")
    place = ByteRange(file, _size(info["offset"]), _size(info["length"]))
    offset = () if index.get("offset") is None else _sizes(index["offset"])
    return (_due(index["fqn"], isinstance(index["fqn"], str), "a name"), offset), place


def _stored(name: str, about: Any, places: dict[tuple[str, Shape], ByteRange]) -> Stored:
    """Return a tensor with its pieces, each of which fits into its place. Raise ValueError where that is not so."""
    fields = _fields(about, "TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    shape, pieces = _sizes(fields["size"]), []
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown_name(name)} has the type {shown(dtype)}")
    for chunk in fields["chunks"]:
        found = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(found["offsets"]), _sizes(found["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"{shown_name(name)} has a piece that is not within its shape {shown(shape)}")
        if (name, offsets) not in places:
            raise ValueError(f"{shown_name(name)} has a piece at {shown(offsets)} that no file holds")
        place = places[name, offsets]
        if math.prod(sizes) * dtype.itemsize > place.size:
            raise ValueError(f"a piece {shown(sizes)} of {shown_name(name)} has only {place.size} bytes")
        pieces.append(StoredPart(tuple(range(o, o + n) for o, n in zip(offsets, sizes, strict=True)), place))
    if sum(math.prod(map(len, piece.part)) for piece in pieces) != math.prod(shape):
        raise ValueError(f"the pieces of {shown_name(name)} are not all of its shape {shown(shape)}")
    return Stored(dtype, shape, pieces)


def _check_places(folder: Path, places: Iterable[ByteRange]) -> None:
    """Raise UserError where a file is missing or too short, or two pieces share bytes, which a small file could use to
    claim a model of any size."""
    by_file = defaultdict(list)
    for place in places:
        by_file[place.file].append(place)
    for name, found in by_file.items():
        path = folder / name
        if not path.exists():
            raise UserError(f"{path} is missing; copy the whole checkpoint")
        with reading(path, "copy the whole checkpoint"), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        end = 0
        for place in sorted(found, key=lambda place: (place.begin, place.size)):
            if place.begin < end:
                raise UserError(f"{folder / METADATA} has two pieces at byte {place.begin} of {name}; copy it again")
            end = place.begin + place.size
        if end > size:
            raise UserError(f"{path} has {size} bytes, where {METADATA} says {end}; copy it again, whole")
    check_distinct(folder / name for name in by_file)


def _within(inner: Iterable[range], outer: Iterable[range]) -> tuple[slice, ...]:
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))
