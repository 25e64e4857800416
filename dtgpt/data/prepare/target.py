"""Names that a preparation writes to: they belong to one process at a time, and to the next after a kill -9."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dtgpt.data.megatron.indexed import IndexedDataset, bin_path, idx_path, tokenizer_path
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import FileLock, Held


@contextmanager
def lock_prefix(prefix: Path) -> Iterator[None]:
    """Keep `prefix` for this process within the context. What a killed one left of it is removed, or put in place
    where it was whole. Raises UserError where another process writes it or its folder cannot be made."""
    with folder_of(prefix, "--output-prefix"), _locked(prefix, "--output-prefix") as alone:
        if alone:
            _finish_killed(prefix)
        yield


@contextmanager
def lock_list(path: Path, overwrite: bool) -> Iterator[None]:
    """Keep the file of `--broken` in the same way. Raises UserError where it exists already or is a folder, too."""
    with _locked(path, "--broken") as alone:
        if alone:
            _remove(_left(path))
        if path.is_dir():
            raise UserError(f"--broken {path} is a folder; name a file in it")
        if path.exists() and not overwrite:
            raise UserError(f"--broken {path} exists already; give another file, or add --overwrite to replace it")
        yield


@contextmanager
def folder_of(path: Path, option: str) -> Iterator[None]:
    """Provide the folder for `path`, given as `option`, within the context. Folders that are made for it and stay empty
    are removed. Raises UserError where it cannot be made or written to."""
    made = []
    try:
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        _remove_folders(made)
        raise _unwritable(path, option, error) from None
    try:
        yield
    finally:
        _remove_folders(made)


def _remove_folders(made: list[Path]) -> None:
    for folder in made:  # from the innermost
        with suppress(OSError):  # where it is not empty, or was not made after all
            folder.rmdir()


def _unwritable(path: Path, option: str, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{path} would lie in a file, not in a folder; give another {option}")
    return UserError(f"{path} cannot be written ({error.strerror}); give another {option}")


def check_target(prefix: Path, overwrite: bool) -> None:
    """Raise UserError where a dataset would be replaced by mistake, or a folder by a dataset."""
    for path in (bin_path(prefix), idx_path(prefix), tokenizer_path(prefix)):
        if path.is_dir():
            raise UserError(f"{path} is a folder; give another --output-prefix")
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists already; give another --output-prefix, or add --overwrite to replace it")


@contextmanager
def _locked(path: Path, option: str) -> Iterator[bool]:
    """Lock `path`, given as `option`, within the context; provide whether the file system can lock."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), remove=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except Held as held:
            raise UserError(f"{path} is being written by {held}; wait for it, or give another {option}") from None
        except OSError as error:
            raise _unwritable(path, option, error) from None
        if lock.problem:
            say(f"{path} cannot be locked ({lock.problem}): let no other process write it", warning=True)
        yield not lock.problem


def _finish_killed(prefix: Path) -> None:
    """Put in place or remove what killed processes left.

    The writer renames the .bin and then the .idx, when both are on the disk: a process
    that was killed in between has left a whole dataset whose .idx lacks its name alone, perhaps the .bin too."""
    for index in _left(idx_path(prefix)):
        data = index.with_name(index.name.replace(f"{prefix.name}.idx", f"{prefix.name}.bin"))
        data = data if data.exists() else bin_path(prefix)
        if not idx_path(prefix).exists() and _are_whole(data, index):
            data.rename(bin_path(prefix))
            tokenizer = index.with_name(index.name.replace(f"{prefix.name}.idx", f"{prefix.name}.tokenizer.json"))
            if tokenizer.is_file() and not tokenizer.is_symlink():
                tokenizer.rename(tokenizer_path(prefix))
            index.rename(idx_path(prefix))
            say(f"{prefix}: a preparation that was killed had written all of it; it is in place now", warning=True)
    _remove(_left(bin_path(prefix)) + _left(idx_path(prefix)) + _left(tokenizer_path(prefix)))


def _remove(left: list[Path]) -> None:
    for path in left:
        path.unlink(missing_ok=True)
        say(f"{path}, left by a preparation that was killed, is removed", warning=True)


def _left(path: Path) -> list[Path]:
    """Return the files under the names that `IndexedWriter` and `BrokenLines` write `path` under first."""
    beginning = f".{path.name}."
    return sorted(
        p for p in path.parent.iterdir()
        if p.name.startswith(beginning) and p.suffix == ".new" and p.name[len(beginning) : -4].isdecimal()
    )  # fmt: skip


def _are_whole(data: Path, index: Path) -> bool:
    if data.is_symlink() or index.is_symlink():  # which no preparation writes
        return False
    with tempfile.TemporaryDirectory() as folder:
        for path, suffix in ((data, "bin"), (index, "idx")):
            (Path(folder) / f"whole.{suffix}").symlink_to(path.absolute())
        try:
            IndexedDataset(Path(folder) / "whole")
        except UserError:
            return False
    return True
