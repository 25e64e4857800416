"""Arrays in files, of which each access reads what it asks for, and folders of them in the cache.

A memory map would do the same with less code. But where its file shrinks, because another program truncates it or
copies over it, the next access ends the process without a word (SIGBUS) or finds zeros. `pread` returns fewer bytes
than were asked for instead, which becomes a sentence that names the file. What was read stays in the page cache, which
all processes share, and does not count as memory of this one.

A folder of the cache is computed once, and verified whenever it is opened. It holds one .npy per array, perhaps text
files, and a list of their sizes and checksums; one that does not match its list is made again. One process makes a
folder at a time; where the file system cannot lock, several may."""

import hashlib
import json
import operator
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np

from dtgpt.util.console import say
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.storage import (
    FileLock,
    Held,
    atomic_folder,
    open_regular,
    parse_json,
    read_regular,
    remove_tree,
    write_text,
)

CHUNK = 1 << 24  # bytes
NPY_HEADER = 1 << 12  # bytes that hold the header of any .npy without named fields
COPY_AGAIN = "copy or build it again, and leave it alone while it is read"


class OpenFile:
    """A regular file that any thread may read at any place, and that must keep its `size`. remedy: what the user can do
    if it does not. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path, remedy: str = COPY_AGAIN):
        self.path, self.remedy = path, remedy
        file = open_regular(path)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer`, of bytes, from byte `offset`. Raises UserError if the file ends before."""
        try:
            done = os.preadv(self._descriptor, [buffer], offset)
            while done < len(buffer):  # the kernel reads 2 GiB at once at most
                more = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if more == 0:
                    raise self._changed(offset + done)
                done += more
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read any more at byte {offset} ({error.strerror}); check its disk, or "
                f"{self.remedy}"
            ) from None

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from byte `offset`. Raises UserError if the file ends before."""
        found = bytearray(count)
        self.read_into(memoryview(found), offset)
        return bytes(found)

    def chunks(self) -> Iterator[bytes]:
        """Yield the whole file in pieces."""
        for begin in range(0, self.size, CHUNK):
            yield self.read(begin, min(CHUNK, self.size - begin))

    def _changed(self, end: int) -> UserError:
        size = os.fstat(self._descriptor).st_size
        return UserError(
            f"{self.path} had {self.size} bytes when it was opened, and ends at byte {min(size, end)} now: something "
            f"truncated it or wrote over it; {self.remedy}"
        )


def open_file(path: Path) -> OpenFile:
    """Open a file of tokens or of their index. Raises UserError if it cannot be opened."""
    try:
        return OpenFile(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); give the prefix of a readable .bin and .idx") from None


class FileArray:
    """A read-only array of `shape` in a file, from byte `begin` on. Indexing with a number, a slice or an array of row
    numbers reads those rows; functions of NumPy read all of them."""

    def __init__(self, file: OpenFile, dtype: np.dtype | str, begin: int, shape: tuple[int, ...] | int):
        self.dtype, self.shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
        self.file, self._begin = file, begin
        self._row = self.dtype.itemsize * int(np.prod(self.shape[1:]))  # bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(key, slice):
            begin, stop, step = key.indices(len(self))
            if step == 1:
                return self.slice(begin, max(stop - begin, 0))
            return self.take(np.arange(begin, stop, step))
        if np.ndim(key):
            return self.take(np.asarray(key))
        row = operator.index(key)
        return self.slice(row + len(self) if row < 0 else row, 1)[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self.slice(0, len(self))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def tolist(self) -> list:
        return self[:].tolist()

    def slice(self, begin: int, count: int) -> np.ndarray:
        """Read rows `begin` to `begin + count`."""
        return self.gather(np.array([begin]), np.array([count]))

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Read the rows of these numbers `[R]`, with one call for those that follow each other."""
        if not len(rows):
            return self.slice(0, 0)
        rows = rows.astype(np.int64)
        firsts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        return self.gather(rows[firsts], np.diff(firsts, append=len(rows)))

    def gather(self, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Read the rows of P pieces one after another; `begins` and `counts` int64 [P]. Raises IndexError."""
        ends = begins + counts
        if len(ends) and (begins.min() < 0 or counts.min() < 0 or ends.max() > len(self)):
            raise IndexError(f"rows {begins.min()} to {ends.max()} of {len(self)}")
        found = np.empty((int(counts.sum()), *self.shape[1:]), self.dtype)
        if not found.size:
            return found
        view = found.reshape(-1).view(np.uint8).data
        stops = np.cumsum(counts) * self._row
        places = zip((stops - counts * self._row).tolist(), stops.tolist(), begins.tolist(), strict=True)
        for start, stop, begin in places:
            self.file.read_into(view[start:stop], self._begin + begin * self._row)
        return found


Array = FileArray | np.ndarray


def open_npy(file: OpenFile) -> FileArray:
    """Open the array that `numpy.save` wrote. Raises ValueError for another file."""
    header = BytesIO(file.read(0, min(file.size, NPY_HEADER)))
    if np.lib.format.read_magic(header) != (1, 0):
        raise ValueError("not a .npy of version 1.0")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    begin = header.tell()
    if fortran_order or dtype.hasobject or begin + dtype.itemsize * int(np.prod(shape)) != file.size:
        raise ValueError("not a plain array of this size")
    return FileArray(file, dtype, begin, shape)


INDEX_FORMAT = 1  # raise when the same settings would give other arrays
CONTENTS = "contents.json"
# What a killed process leaves, of this version or of one before.
LEFT = re.compile(r"\.(?:partial-)?((?:index|text)-[0-9a-f]+)(?:-.+|\.lock|\.[0-9a-f]{8}\.new)")
AGAIN = "start again: it is made anew"

Contents = Mapping[str, np.ndarray | str]  # arrays by their names, texts by those of their files


def check_memory(num_bytes: int, what: str) -> None:
    """Raise UserError if arrays of so many bytes, which `what` needs, do not fit into this machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > total:
        raise UserError(
            f"{what} takes {num_bytes:,} bytes while its index is built, and this machine has "
            f"{total:,}; ask for fewer samples"
        )


def cached_index(
    cache: Path | None, settings: Mapping[str, object], build: Callable[[], dict[str, np.ndarray]]
) -> Mapping[str, FileArray | np.ndarray]:
    """Return the arrays that `build` makes from `settings` (JSON values), from the cache if there is one. Raises
    UserError."""
    if cache is None:
        return build()
    text = json.dumps({"format": INDEX_FORMAT, **settings}, sort_keys=True, default=int)
    folder = cache / f"index-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return load_or_make(folder, "the index of samples", build)


def load_or_make(folder: Path, what: str, make: Callable[[], Contents]) -> dict[str, FileArray]:
    """Return the arrays of `folder`; if it is missing or damaged, write what `make` returns first. Messages call the
    arrays `what`. Raises UserError if they cannot be written."""
    found = _load(folder)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(folder.parent)
        with _lock(folder, wait=True):
            found = _load(folder, warn=True)  # again: another process may have made it while this one waited
            if found is None:
                _write(folder, make())
                found = _load(folder)
    except OSError as error:
        # numpy, too, gives no number where a disk is full or a file too large.
        advice = remedy(error, "make it writable" if error.errno else "free space there")
        raise UserError(
            f"{what} cannot be cached in {folder.parent} ({error}); {advice}, or set DTGPT_CACHE to another folder"
        ) from None
    if found is None:
        raise UserError(f"{folder} does not hold what was just written; free or change the disk, or set DTGPT_CACHE")
    return found


def _load(folder: Path, warn: bool = False) -> dict[str, FileArray] | None:
    """Return None if there is no folder, or if it is damaged."""
    if not os.path.exists(folder):
        return None
    path = folder / CONTENTS
    try:
        listed = parse_json(read_regular(path))
        if not isinstance(listed, dict) or not listed:
            raise ValueError("it lists nothing")
        arrays = {}
        for name, written in listed.items():
            path = _file(folder, name)
            file = OpenFile(path, AGAIN)
            if _checksum(file) != written:
                raise ValueError("it is not what was written")
            if path.suffix == ".npy":
                arrays[name] = open_npy(file)
        return arrays
    except (OSError, ValueError, UserError) as error:
        if warn:
            reason = getattr(error, "strerror", None) or error
            say(f"{folder} is damaged ({path.name}: {reason}); it is made again", warning=True)
        return None


def _file(folder: Path, name: str) -> Path:
    return folder / (name if "." in name else f"{name}.npy")


def _checksum(file: OpenFile) -> list[int]:
    """Return the number of bytes and their CRC-32."""
    value = 0
    for chunk in file.chunks():
        value = zlib.crc32(chunk, value)
    return [file.size, value]


def _write(folder: Path, contents: Contents) -> None:
    """Write a folder, in place of a damaged one. Raises OSError."""
    try:
        with atomic_folder(folder) as partial:
            for name, value in contents.items():
                if isinstance(value, str):
                    _file(partial, name).write_text(value)
                else:
                    np.save(_file(partial, name), value)
            sums = {name: _checksum(OpenFile(_file(partial, name))) for name in contents}
            write_text(partial / CONTENTS, json.dumps(sums))
            if _load(folder) is None:
                remove_tree(folder)
    except OSError:
        if _load(folder) is None:  # otherwise another process was faster, without locks
            raise


def _lock(folder: Path, wait: bool = False) -> FileLock:
    return FileLock(folder.with_name(f".{folder.name}.lock"), wait, remove=True)


def _remove_left(cache: Path) -> None:
    """Remove what killed processes left. A process that makes a folder holds its lock until nothing is left."""
    for path in cache.iterdir():
        if named := LEFT.fullmatch(path.name):
            with suppress(OSError, Held, UserError), _lock(cache / named[1]) as lock:
                if not lock.problem and path.is_dir():
                    remove_tree(path)
