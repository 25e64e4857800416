"""Locks by the kernel, which frees them when their process is gone: the file of a killed one is in nobody's way."""

import errno
import fcntl
import os
import platform
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import FileLock, Held


class Flock(FileLock):
    """A lock whose file carries host and pid of its holder."""

    def __init__(self, path: Path, wait: bool = False, remove: bool = False):
        super().__init__(path, wait, remove)
        self.problem = ""
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        while self._descriptor is None:
            descriptor = _open_lock(self.path)
            try:
                self._lock(descriptor)
                if self.problem or self._is_there(descriptor):
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        with suppress(OSError):  # on a full disk it is a lock all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} on {platform.node()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._remove:
            with suppress(OSError):
                self.path.unlink()  # while it is held: who waits for it looks whether it is still there
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_there(self) -> bool:
        return self._descriptor is not None and self._is_there(self._descriptor)

    def _lock(self, descriptor: int) -> None:
        self.problem = ""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = Held(_holder(descriptor))
            if not self._wait:
                raise held from None
            say(f"{self.path} is held by {held}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            self.problem = error.strerror or str(error)

    def _is_there(self, descriptor: int) -> bool:
        """Return whether the file still has its name: its holder may just have removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.lstat())
        except OSError as error:  # others may pass
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def _open_lock(path: Path) -> int:
    """Open a regular file that has no other name: through a link somebody else's file would be written to, and opening
    a FIFO would wait for a reader. Raises UserError for anything else, OSError where it cannot be made."""
    refused = UserError(f"{path} is not a regular file with one name, which a lock must be; remove it")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise refused if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) else error from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise refused
    return descriptor


def _holder(descriptor: int) -> str:
    """Return "another process", with the host and pid that the file names."""
    text = os.pread(descriptor, 512, 0).decode(errors="replace")
    found = re.match(r"pid \d{1,10} on [\w.-]{1,255}\n", text)
    return f"another process ({found[0].strip()})" if found else "another process"
