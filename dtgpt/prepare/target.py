"""Names that a preparation writes to: they belong to one process at a time, and to the next after a kill -9."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from dtgpt.console import say
from dtgpt.data.indexed import IndexedDataset, bin_path, idx_path
from dtgpt.errors import UserError


@contextmanager
def claimed(prefix: Path, overwrite: bool) -> Iterator[None]:
    """`prefix` belongs to this process within the context. What a killed one left of it is removed, or put in place
    where it was whole.

    Raises UserError where the dataset exists already, another process writes it or its folder cannot be made.
    """
    lock = _lock_path(prefix)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        file, alone = _locked(lock, prefix)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{prefix} would lie in a file, not in a folder; give another --output-prefix") from None
    except OSError as error:
        raise UserError(f"{prefix} cannot be written ({error.strerror}); choose another --output-prefix") from None
    try:
        if alone:
            _mend(prefix)
        check_target(prefix, overwrite)
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: who waits for it looks whether it is still there
        file.close()


def check_target(prefix: Path, overwrite: bool) -> None:
    """A dataset is not replaced by mistake. Raises UserError."""
    existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if existing and not overwrite:
        raise UserError(f"{existing[0]} exists already; give another --output-prefix, or add --overwrite to replace it")


def _lock_path(prefix: Path) -> Path:
    return prefix.with_name(f".{prefix.name}.lock")


def _locked(path: Path, prefix: Path) -> tuple[TextIO, bool]:
    """The lock, held for as long as the file is open, and whether that keeps others out. The kernel frees it when its
    process is gone."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{prefix} is being written by another process; wait for it, or give another --output-prefix"
            ) from None
        except OSError as error:  # a file system without locks
            say(f"{prefix} cannot be locked ({error.strerror}): let no other process write it", warning=True)
            return file, False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, True
        file.close()  # of a process that has just removed it


def _mend(prefix: Path) -> None:
    """Files of killed processes. The writer renames the .bin and then the .idx, when both are on the disk: a process
    that was killed in between has left a whole dataset whose .idx lacks its name alone, perhaps the .bin too."""
    for index in _left(idx_path(prefix)):
        data = index.with_name(index.name.replace(f"{prefix.name}.idx", f"{prefix.name}.bin"))
        data = data if data.exists() else bin_path(prefix)
        if not idx_path(prefix).exists() and _are_whole(data, index):
            data.rename(bin_path(prefix))
            index.rename(idx_path(prefix))
            say(f"{prefix}: a preparation that was killed had written all of it; it is in place now", warning=True)
    for path in (*_left(bin_path(prefix)), *_left(idx_path(prefix))):
        path.unlink(missing_ok=True)
        say(f"{path}, left by a preparation that was killed, is removed", warning=True)


def _left(path: Path) -> list[Path]:
    """Files under the names that `IndexedWriter` writes `path` under first."""
    beginning = f".{path.name}."
    return sorted(
        p for p in path.parent.iterdir()
        if p.name.startswith(beginning) and p.suffix == ".new" and p.name[len(beginning) : -4].isdecimal()
    )  # fmt: skip


def _are_whole(data: Path, index: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for path, suffix in ((data, "bin"), (index, "idx")):
            (Path(folder) / f"whole.{suffix}").symlink_to(path.absolute())
        try:
            IndexedDataset(Path(folder) / "whole")
        except UserError:
            return False
    return True
