"""Arrays in files, of which each access reads what it asks for.

A memory map would do the same with less code. But where its file shrinks, because another program truncates it or
copies over it, the next access ends the process without a word (SIGBUS) or finds zeros. `pread` returns fewer bytes
than were asked for instead, which becomes a sentence that names the file. What was read stays in the page cache, which
all processes share, and does not count as memory of this one."""

import operator
import os
import weakref
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from dtgpt.util.errors import UserError
from dtgpt.util.storage import open_regular

CHUNK = 1 << 24  # bytes
NPY_HEADER = 1 << 12  # bytes that hold the header of any .npy without named fields
COPY_AGAIN = "copy or build it again, and leave it alone while it is read"
AGAIN = "start again: it is made anew"


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

    def checksum(self) -> list[int]:
        """Return the number of bytes and their CRC-32."""
        value = 0
        for chunk in self.chunks():
            value = zlib.crc32(chunk, value)
        return [self.size, value]

    def array(self) -> "FileArray":
        """Return the array that `numpy.save` wrote into the file. Raise ValueError where it holds none."""
        return open_npy(self)

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


def open_cached(path: Path) -> OpenFile:
    """Open a file of the cache, of which each access reads what it asks for."""
    return OpenFile(path, AGAIN)


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


def check_memory(num_bytes: int, what: str) -> None:
    """Raise UserError if arrays of so many bytes, which `what` needs, do not fit into this machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > total:
        raise UserError(
            f"{what} takes {num_bytes:,} bytes while its index is built, and this machine has "
            f"{total:,}; ask for fewer samples"
        )
