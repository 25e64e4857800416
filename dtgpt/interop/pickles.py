"""Files that torch.save or pickle wrote, read by an unpickler that runs nothing (`unpickler.py`)."""

import filecmp
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any, BinaryIO
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.library_tokenizers.unpickler import StandIn, read_pickle
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import open_regular

ZIP_MAGIC, LOCAL_HEADER = b"PK\x03\x04", 30  # with which an entry of an archive begins, and bytes before its name
TAIL = 4096  # bytes
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # with which files before torch 1.6 begin
STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32,
}  # fmt: skip


class Checksums:
    """The CRC-32 that an archive has of each storage, to be checked when that is used: then it is read anyway. Files
    before torch 1.6 have none."""

    def __init__(self, path: Path):
        self._path = path
        self._left: dict[int, tuple[Tensor, int]] = {}  # by address: bytes and checksum

    def expect(self, content: Tensor, checksum: int) -> None:
        """Take the bytes `content` of a storage, mapped, and what their checksum must be."""
        self._left[content.data_ptr()] = content, checksum

    @property
    def mark(self) -> frozenset[tuple[int, int]]:
        """Return sizes and checksums of the storages that are not checked yet; of two files with the same tensors they
        agree."""
        return frozenset((content.numel(), checksum) for content, checksum in self._left.values())

    def check(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the file. Raise UserError where its storage is not what was written."""
        content, expected = self._left.pop(tensor.untyped_storage().data_ptr(), (None, 0))
        if content is not None and crc32(content.numpy().data) != expected:
            raise UserError(
                f"{self._path} is damaged: a tensor of {content.numel()} bytes in it differs from its checksum; copy "
                "the file again, whole"
            )
        return tensor

    def check_all(self) -> None:
        """Raise UserError where any storage is not what was written."""
        for content, _ in list(self._left.values()):
            self.check(content)


def open_pickle(path: Path, checksums: Checksums | None = None) -> dict[str, Any]:
    """Return the dictionary in a file of torch.save, with tensors on the CPU: mapped, so that only what is used is
    read, unless the file is of the format before torch 1.6. `checksums`: takes those of the file, which are checked at
    once where it is None. Raise UserError for a file that is missing or broken, or holds something else than a
    dictionary."""
    with _opened(path) as file:
        zipped = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        file.seek(0)
        found = Checksums(path) if checksums is None else checksums
        content = _read_archive(path, file, 0, file_size(file), found) if zipped else _read_old(file)
        if checksums is None:
            found.check_all()
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {shown(content)}, not a checkpoint's dictionary; give another file")
    return content


def open_embedded(path: Path, begin: int, size: int, check: bool = True) -> Any:
    """Return the object that torch.save wrote into `size` bytes of a larger file, from byte `begin` on, with tensors as
    `open_pickle` has them. check: compare their checksums. Raise UserError for a file that is missing or broken, or has
    no such object there."""
    with _opened(path) as file:
        if not 0 <= begin <= begin + size <= file_size(file):
            raise ValueError(f"it ends before byte {shown(begin + size)}")
        checksums = Checksums(path)
        content = _read_archive(path, file, begin, size, checksums)
        if check:
            checksums.check_all()
        return content


def check_distinct(paths: Iterable[Path]) -> None:
    """Raise UserError where two files, each of another rank, have the same bytes."""
    alike: dict[tuple[int, bytes], Path] = {}
    for path in paths:
        with _opened(path) as file:
            file.seek(-min(TAIL, file_size(file)), os.SEEK_END)
            mark = file_size(file), file.read()  # the checksums of all tensors stand at the end of an archive
        other = alike.setdefault(mark, path)
        if other is not path and filecmp.cmp(other, path, shallow=False):
            raise UserError(f"{other} and {path} are the same file; copy the file of each rank")


def open_bare_pickle(path: Path, most_reads: int | None = None) -> Any:
    """Return the object in a file of `pickle.dump`, which has no tensors. `most_reads`: as in `read_pickle`. Raise
    UserError for a file that is missing or broken."""
    with _opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return read_pickle(content, most_reads=most_reads)


def file_size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read a pickle in it, and raise any error as a UserError."""
    try:
        with open_regular(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy the whole checkpoint") from None
    except UserError:
        raise
    except Exception as error:  # a damaged or hostile pickle can make the reader raise anything
        reason = (str(error).strip().splitlines() or [""])[-1][:200]
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {reason}); copy it again, whole") from None


class _Window(RawIOBase):
    """`size` bytes of a file, from `begin` on, as a file of their own."""

    def __init__(self, file: BinaryIO, begin: int, size: int):
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._begin + self._at)
        found = self._file.read(left if count is None or count < 0 else min(count, left))
        self._at += len(found)
        return found


def _read_archive(path: Path, file: BinaryIO, begin: int, size: int, checksums: Checksums) -> Any:
    """Read a zip archive of ROOT/data.pkl and ROOT/data/KEY, the storages, none compressed: the `size` bytes of the
    file from `begin` on. `checksums` takes those of the storages."""
    window = _Window(file, begin, size)
    with zipfile.ZipFile(window) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        root = next(iter(entries)).partition("/")[0]
        for entry in entries.values():
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:  # a little could become any number
                raise UserError(f"{path} is compressed or encrypted ({shown(entry.filename)}); write it by torch.save")
        if f"{root}/byteorder" in entries and archive.read(entries[f"{root}/byteorder"]) != b"little":
            raise UserError(f"{path} has numbers in big-endian order; save it again on a little-endian machine")
        pickled = archive.read(entries[f"{root}/data.pkl"])
    mapped = torch.UntypedStorage.from_file(str(path), False, begin + size)

    @cache  # tied weights are one tensor
    def find(key: str, dtype: torch.dtype, count: int) -> Tensor:
        entry, num_bytes = entries[f"{root}/data/{key}"], count * dtype.itemsize
        window.seek(entry.header_offset)
        header = window.read(LOCAL_HEADER)
        if not header.startswith(ZIP_MAGIC):
            raise ValueError(f"there is no entry at byte {entry.header_offset}")
        sizes = header[26:28], header[28:30]  # of the name and of the extra field
        first = window.tell() + sum(int.from_bytes(size, "little") for size in sizes)
        if num_bytes > entry.file_size or first + num_bytes > size:
            raise ValueError(f"storage {shown(key)} has {entry.file_size} bytes, where {shown(num_bytes)} are due")
        if first + entry.file_size > size:
            raise ValueError(f"storage {shown(key)} is not whole")
        if num_bytes:
            whole = mapped[begin + first : begin + first + entry.file_size]
            checksums.expect(torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole), entry.CRC)
        return torch.empty(0, dtype=dtype, device="cpu").set_(mapped[begin + first : begin + first + num_bytes])

    return read_pickle(BytesIO(pickled), lambda identity: _find_storage(identity, find))


def _read_old(file: BinaryIO) -> Any:
    """Read the format before torch 1.6, pickles followed by the storages, into memory."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # no read is longer than the file
        magic, protocol, about = (read_pickle(content) for _ in range(3))
        if (magic, protocol) != (MAGIC, PROTOCOL) or about.get("little_endian") is not True:
            raise ValueError("it does not begin as a little-endian file of torch.save")
        found: dict[str, Tensor] = {}
        left = len(content)

        def find(key: str, dtype: torch.dtype, count: int) -> Tensor:
            nonlocal left
            if key not in found:
                left -= count * dtype.itemsize
                if left < 0:
                    raise ValueError(f"storage {shown(key)} of {shown(count)} elements is larger than the file")
                found[key] = torch.empty(count, dtype=dtype, device="cpu")
            return found[key]

        saved = read_pickle(content, lambda identity: _find_storage(identity, find))
        for key in read_pickle(content):
            storage = found.pop(key)
            count, begin = int.from_bytes(content.read(8), "little"), content.tell()
            if count != storage.numel() or begin + storage.nbytes > len(content):
                raise ValueError(f"storage {shown(key)} is not whole")
            storage.view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8, storage.nbytes, begin)
            content.seek(begin + storage.nbytes)
    if found:
        raise ValueError(f"storage {shown(min(found))} is missing")
    return saved


def _find_storage(identity: Any, find: Callable[[str, torch.dtype, int], Tensor]) -> Tensor | StandIn:
    """Return the storage of a persistent id: ("storage", type, key, device, elements) and, before torch 1.6, the part
    of it that is meant. One whose type is unknown is a stand-in, as is a module's class, which has an id there."""
    if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
        return identity[1] if isinstance(identity[1], StandIn) else StandIn("module", identity)
    word, kind, key, _, count, *view = identity
    known = word == "storage" and isinstance(kind, StandIn) and isinstance(key, str)
    if not known or type(count) is not int or not 0 <= count < 1 << 62:
        raise ValueError(f"it has the persistent id {shown(identity)}")
    dtype = STORAGES.get(kind.foreign.rpartition(".")[2]) if kind.foreign.startswith("torch.") else None
    if dtype is None or any(part is not None for part in view):
        return StandIn(kind.foreign, (key,))
    return find(key, dtype, count)
