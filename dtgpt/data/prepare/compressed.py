"""Files as streams of bytes, decompressed by their first bytes; their names do not matter."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any

from dtgpt.util.errors import UserError
from dtgpt.util.shared.optional import optional_package

SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
PIECE = 1 << 18  # bytes read at once, and bytes of a piece at most
ZSTD_INPUT = 1 << 11  # bytes of which zstd makes 64 MiB at most
HEAD = 512  # bytes by which a format is known
LARGEST_WINDOW = 1 << 30  # bytes of memory that a file of xz may ask for
GZIP, XZ = rb"\x1f\x8b", rb"\xfd7zXZ\x00"
BZIP2 = rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"  # a text may well begin with BZh
ZSTD = rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"  # of a frame, or of one to be skipped, as pzstd puts first
REFUSED = (
    (rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18", "compressed with lz4", "unpack it with lz4 -d"),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive", "unpack it with unzip"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it with 7z x"),
    (rb"Rar!\x1a\x07", "a rar archive", "unpack it with unrar x"),
    (rb"LZIP\x01", "compressed with lzip", "unpack it with lzip -d"),
    (rb"\x89LZO\x00\r\n\x1a\n", "compressed with lzop", "unpack it with lzop -d"),
    (rb"\x1f[\x9d\xa0]", "compressed with compress", "unpack it with gzip -d"),
    (rb"\x5d\x00\x00", "compressed with lzma, the format before xz", "unpack it with xz -d"),
    (rb"\xff\x06\x00\x00sNaPpY", "compressed with snappy", "unpack it first"),
    (rb"[\x1e-\x27]\xb5\x2f\xfd", "compressed with a zstd of before 2016", "compress it again"),
    (rb".{257}ustar", "a tar archive", "unpack it with tar -x"),
    (rb"PAR1[\x00-\x1f]", "a Parquet file", "prepare it with --input-format parquet, or write it as JSON lines"),
    (rb"ARROW1\x00\x00", "an Arrow file", "write it as JSON lines"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
)
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def decompressed(raw: BufferedReader, name: str) -> Iterator[bytes]:
    """Yield the content of `raw`, which is at its beginning, in pieces of PIECE bytes at most; `name` is for messages.

    Raises UserError where the file is cut off, damaged, in a format that is not read, or cannot be read, or where
    zstandard is missing.
    """
    try:
        head = raw.peek(HEAD)
        check_format(head, name)
        first = True
        for content in _content(raw, head, name):
            if content and first:
                _check_packed_once(head, content[:HEAD], name)
                first = False
            yield from (content[i : i + PIECE] for i in range(0, len(content), PIECE))
    except (*DAMAGED, MemoryError, OSError) as error:
        raise UserError(f"{name} {_problem(error)}") from None


def _problem(error: Exception) -> str:
    """Return what is said of a file that cannot be unpacked."""
    if re.search("too much memory|Memory usage limit", str(error)):  # of zstd, of xz
        return (
            "asks for more memory than is given to a file (128 MiB for zstd, 1 GiB for xz); unpack it, as with zstd -d "
            "--long=31, or compress it with a smaller window"
        )
    if isinstance(error, MemoryError):
        return "needs more memory than there is; compress it with a smaller window"
    if isinstance(error, OSError) and not isinstance(error, DAMAGED) and error.errno is not None:
        return f"cannot be read: {error.strerror}"
    return f"is damaged or was cut off ({error}); fetch or compress it again"  # bz2 says so by an OSError


def check_format(head: bytes, name: str) -> None:
    """Raise UserError where `head`, the first bytes of a file, are of a format that is not read, or of one whose
    package is not installed."""
    for magic, what, remedy in REFUSED:
        if re.match(magic, head, re.DOTALL):
            raise UserError(f"{name} is {what}, which is not read; {remedy}")
    if re.match(ZSTD, head):
        optional_package("zstandard", f"{name}, compressed with zstd,")


def _check_packed_once(head: bytes, content: bytes, name: str) -> None:
    """Raise UserError where what was unpacked is an archive again."""
    if content[: len(head)] == head[: len(content)]:  # nothing was unpacked
        return
    check_format(content, name)
    if re.match(b"|".join((GZIP, XZ, BZIP2, ZSTD)), content):
        raise UserError(f"{name} is compressed twice; unpack it once")


def _content(raw: BufferedReader, head: bytes, name: str) -> Iterator[bytes]:
    if re.match(ZSTD, head):
        package = optional_package("zstandard", f"{name}, compressed with zstd,")
        return _frames(raw, package.ZstdDecompressor().decompressobj, None, package.ZstdError)
    if re.match(XZ, head):
        return _frames(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LARGEST_WINDOW), PIECE)
    if re.match(BZIP2, head):
        return _frames(raw, bz2.BZ2Decompressor, PIECE)
    file = gzip.GzipFile(fileobj=raw) if re.match(GZIP, head) else raw
    return iter(lambda: file.read(PIECE), b"")


def _frames(
    raw: BufferedReader, new: Callable[[], Any], limit: int | None, *errors: type[Exception]
) -> Iterator[bytes]:
    """Decompress one frame after another. The readers of lzma and bz2 take the first damaged frame for the end of the
    file, and that of zstandard takes a file that is cut off for a whole one. `limit`: the most bytes to be made at
    once; None, where the decompressor knows no limit: little input keeps its output small."""
    frame, arguments = None, () if limit is None else (limit,)
    while data := raw.read(min(PIECE, ZSTD_INPUT if limit is None else PIECE)):
        while data := data if frame else data.lstrip(b"\0"):  # padding may follow a frame of xz
            frame = frame or new()
            try:
                yield frame.decompress(data, *arguments)
                while limit and not (frame.eof or frame.needs_input):
                    yield frame.decompress(b"", limit)
            except errors as error:
                raise EOFError(error) from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame has no end")
