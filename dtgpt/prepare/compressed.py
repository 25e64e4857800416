"""Files as streams of bytes, whatever they are compressed with; the first bytes tell, not the name."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from dtgpt.errors import UserError

SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
OPENERS = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.LZMAFile, b"BZh": bz2.BZ2File}
ZSTD = b"\x28\xb5\x2f\xfd"
PIECE = 1 << 18  # bytes read at once
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def decompressed(raw: BinaryIO, name: str) -> Iterator[bytes]:
    """The content of `raw` (buffered, at its beginning), in pieces; `name` is for messages.

    Raises UserError where the file is cut off, damaged or cannot be read, or where zstandard is missing.
    """
    try:
        head = raw.peek(6)
        if head.startswith(ZSTD):
            yield from _zstd_frames(raw, zstandard(name))
            return
        opener = next((opener for magic, opener in OPENERS.items() if head.startswith(magic)), None)
        file = opener(raw) if opener else raw
        while piece := file.read(PIECE):
            yield piece
    except DAMAGED as error:
        raise UserError(f"{name} is damaged or was cut off ({error}); fetch or compress it again") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None


def zstandard(name: str) -> Any:
    """The package for .zst. Raises UserError where it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{name} is compressed with zstd, for which the package zstandard is missing; run pip install 'dtgpt[data]'"
        ) from None
    return zstandard


def _zstd_frames(raw: BinaryIO, package: Any) -> Iterator[bytes]:
    """One frame after another. The package's own stream reader takes a file that is cut off for a whole one."""
    context, frame = package.ZstdDecompressor(), None
    while data := raw.read(PIECE):
        while data:
            frame = frame or context.decompressobj()
            try:
                yield frame.decompress(data)
            except package.ZstdError as error:
                raise EOFError(error) from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame has no end")
