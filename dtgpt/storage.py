"""Files and folders that are never half there."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dtgpt.errors import UserError

LARGEST_JSON = 1 << 26  # bytes of a file that describes others


def open_regular(path: Path, largest: int | None = None) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, instead of waiting or reading for ever, where `path` is a FIFO, a
    device or a folder, also behind a link, and where the file has more than `largest` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if largest is not None and status.st_size > largest:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, where {largest} are the most")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, largest: int = LARGEST_JSON) -> bytes:
    """Return the content of a regular file; raises OSError as `open_regular` does."""
    with open_regular(path, largest) as file:
        content = file.read(largest + 1)
    if len(content) > largest:  # it grew, or is one that says nothing of its size, as in /proc
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes")
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for any other text, also for one that is nested more deeply
    than Python follows or has an integer of more digits than Python reads."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise
        raise ValueError("it has an integer of too many digits") from None


def read_json(path: Path, remedy: str, largest: int = LARGEST_JSON) -> Any:
    """Return the value in a JSON file. Raises UserError, with `remedy`, where the file cannot be read, is not a regular
    one, has more than `largest` bytes or is not JSON."""
    try:
        return parse_json(read_regular(path, largest))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); {remedy}") from None


def sync_path(path: Path) -> None:
    """Wait until the names in a folder, or the content of a file, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file under another name, and rename it when it is on the disk: it is never half there."""
    other = path.with_name(f".{path.name}.new")
    try:
        with other.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        other.rename(path)
    except OSError as error:  # of a full disk names no file
        with suppress(OSError):
            other.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_tree(folder: Path) -> None:
    """Wait until all files below a folder are on the disk, and their names."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Another folder, to be filled within the context: it is called `folder` when all in it is on the disk. Where the
    context fails nothing is left; an OSError becomes a UserError."""
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had the same number
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        partial.rename(folder)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); free space, or give another path") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, default=repr) + "\n")
