"""Files and folders that are never half written, and never written through a link that somebody else has put there.

A process may be killed at any instruction, a disk may be full, a machine may lose its power. So a file is written under
another name, synced, and renamed: its own name never stands for half of it. What a killed process leaves has a name by
which the next one knows and removes it. Files to read may be FIFOs, devices, or endless: they are refused before."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from dtgpt.util import seams
from dtgpt.util.errors import UserError

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.new")  # names of `temporary_path`

LARGEST_JSON = 1 << 26  # bytes of a file that describes others


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, instead of waiting or reading for ever, if `path` is a FIFO, a
    device or a folder, or a link to one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, largest: int = LARGEST_JSON) -> bytes:
    """Return the content of a regular file. Raises OSError where `path` is none, or has more than `largest` bytes."""
    with open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
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


def read_json(path: Path, advice: str, largest: int = LARGEST_JSON) -> Any:
    """Return the value in a JSON file. Raises UserError, with `advice`, where the file cannot be read, is not a regular
    one, has more than `largest` bytes or is not JSON."""
    try:
        return parse_json(read_regular(path, largest))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {advice}") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read (it is not JSON: {error}); {advice}") from None


def sync_path(path: Path) -> None:
    """Wait until the names in a folder, or the content of a file, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a new file for writing, replacing any file of this name: a link is removed, not followed."""
    path.unlink(missing_ok=True)
    return path.open("xb", buffering)  # "x": fails where a link appears in between


def temporary_path(path: Path, mark: str) -> Path:
    """Return the name of a file that is called `path` when it is whole. mark: of the writer, a `token_hex(4)`."""
    return path.with_name(f".{path.name}.{mark}.new")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file under another name; it is called `path` when the context ends and its content is on the disk. Where
    the context fails, `path` stays what it was. Raises OSError, also for a device such as /dev/null, in whose place a
    file would come."""
    if _is_device(path):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    temporary = temporary_path(path, secrets.token_hex(4))
    try:
        with create_file(temporary) as file:
            yield file
            # The content is on the disk before the name, and the name before this returns: after a loss of power there
            # is the old file or the new one, and none that is empty.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_path(path.parent)
    except OSError as error:  # of a full disk names no file, or the other one
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _is_device(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def remove_leftovers(folder: Path) -> None:
    """Remove the files that killed processes left of `atomic_file`, but not through a link; no other process may be
    writing to the folder."""
    with suppress(OSError):
        for path in [] if folder.is_symlink() else list(folder.iterdir()):
            if TEMPORARY.fullmatch(path.name) and not path.is_dir():  # of a model that is being converted
                path.unlink()


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it; of a link the link alone. What cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a small file by `atomic_file`. Raises OSError."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, default=repr) + "\n")


class Held(Exception):
    """Another process has the lock: "another process (pid 17 on node3)", or without host and pid if unknown."""


class FileLock:
    """The exclusive lock on a file; a context in which it is held. Here nothing is locked: a capability does it.

    `problem` says why there is no lock, and is empty where there is one. Entering raises Held; UserError where the file
    is not a regular one; OSError where it cannot be made.
    """

    problem = "no capability here locks files"

    def __new__(cls, *_: Any, **options: Any) -> Self:
        kinds = seams.listed("locks") if cls is FileLock else []
        return super().__new__(kinds[0] if kinds else cls)

    def __init__(self, path: Path, wait: bool = False, remove: bool = False):
        """wait: wait for another process instead of raising Held. remove: remove the file when the lock is freed."""
        self.path, self._wait, self._remove = path, wait, remove

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the lock."""

    def is_there(self) -> bool:
        """Return whether the held file still has its name: no folder above it was moved, removed or replaced."""
        return self.path.parent.is_dir()


def located(name: str | os.PathLike[str]) -> Path:
    """Return the path that a user names: `name` itself, or where a capability has what is named otherwise. Raises
    UserError where it cannot be had."""
    return seams.ask("places", lambda place: place(os.fspath(name))) or Path(name)


def did_you_mean(path: Path, otherwise: str) -> str:
    """Return `did you mean runs/gpt2_tiny-001?` for a path that does not exist, `otherwise` where nothing is near."""
    near = next((find(path) for find in seams.listed("near_paths")), None)
    return otherwise if near is None else f"did you mean {near}?"
