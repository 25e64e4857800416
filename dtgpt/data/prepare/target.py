"""Names that a preparation writes to: they belong to one process at a time, and to the next after a kill -9."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO

from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.megatron.paths import bin_path, idx_path, tokenizer_path, weights_path
from dtgpt.data.prepare.documents import STDIN
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.shared.output_files import leftovers_of, try_to_write
from dtgpt.util.storage import FileLock, Held, atomic_file, temporary_path


@contextmanager
def lock_prefix(prefix: Path) -> Iterator[None]:
    """Keep `prefix` for this process within the context. What a killed process left of it is removed, or put in place
    if it is whole. Raises UserError if another process writes it or its folder cannot be made."""
    lock = FileLock(prefix.with_name(f".{prefix.name}.lock"), remove=True)
    with folder_of(prefix, "--output-prefix"), ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except Held as held:
            raise UserError(f"{prefix} is being written by {held}; wait, or give another --output-prefix") from None
        except OSError as error:
            raise _unwritable(prefix, "--output-prefix", error) from None
        if lock.problem:
            say(f"{prefix} cannot be locked ({lock.problem}): let no other process write it", warning=True)
        else:
            _finish_killed(prefix)
        yield


def check_new(path: Path, option: str, overwrite: bool, name: str = "") -> None:
    """Raise UserError if `path`, to be written for `option`, is a folder, or would be replaced by mistake. name: what
    messages call it; none: the option and the path."""
    name = name or f"{option} {path}"
    if path.is_dir():
        raise UserError(f"{name} is a folder; give another {option}, such as a file in it")
    if path.exists() and not overwrite:
        raise UserError(f"{name} exists already; give another {option}, or add --overwrite to replace it")


def check_list(path: Path, overwrite: bool, prefixes: Iterable[Path]) -> None:
    """Raise UserError if `path`, given as `--broken`, is a folder, a file of the datasets `prefixes`, or would be
    replaced by mistake."""
    check_not_read(
        path,
        "--broken",
        (str(file) for prefix in prefixes for file in _files_of(prefix)),
        "of the dataset that is written",
    )
    check_new(path, "--broken", overwrite)


def check_not_read(
    path: Path, option: str, files: Iterable[str | None], why: str = "that is read, and would be replaced"
) -> None:
    """Raise UserError if `path`, given as `option`, is one of the files that are used, which `--overwrite` would lose.
    why: what these are."""
    if any(file is not None and file != STDIN and is_same(path, Path(file)) for file in files):
        raise UserError(f"{option} {path} is a file {why}; give another file")


def is_same(path: Path, other: Path) -> bool:
    """Return whether two paths lead to one file."""
    return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def open_list(path: Path) -> Iterator[IO[bytes]]:
    """Open the file of `--broken`, which appears when the context ends without an error. Raises UserError."""
    try:
        with atomic_file(path) as file:
            yield file
    except OSError as error:
        raise _unwritable(path, "--broken", error) from None


@contextmanager
def folder_of(path: Path, option: str) -> Iterator[None]:
    """Provide the folder for `path`, given as `option`, within the context. Folders that are made for it and stay empty
    are removed. Raises UserError if it cannot be made or written to."""
    made: list[Path] = []
    try:
        try:
            made += [folder for folder in path.parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            try_to_write(path)
        except OSError as error:
            raise _unwritable(path, option, error) from None
        yield
    finally:
        for folder in made:  # from the innermost
            with suppress(OSError):  # it is not empty, or was not made after all
                folder.rmdir()


def _unwritable(path: Path, option: str, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{path} would lie in a file, not in a folder; give another {option}")
    return UserError(f"{path} cannot be written ({error.strerror}); give another {option}")


def check_target(prefix: Path, overwrite: bool) -> None:
    """Raise UserError if a dataset would be replaced by mistake, or a folder by a dataset."""
    for path in _files_of(prefix):
        check_new(path, "--output-prefix", overwrite, str(path))


def _files_of(prefix: Path) -> tuple[Path, ...]:
    return bin_path(prefix), idx_path(prefix), tokenizer_path(prefix), weights_path(prefix)


def _finish_killed(prefix: Path) -> None:
    """Put in place or remove what killed processes left.

    The writer renames the .bin, the tokenizer, the weights and then the .idx, when all are on the disk: a process that
    was killed in between has left a whole dataset, of which the .idx and perhaps other files lack their names."""
    data, tokenizer, index = bin_path(prefix), tokenizer_path(prefix), idx_path(prefix)
    weights = weights_path(prefix)
    for left in leftovers_of(index):
        mark = left.name.split(".")[-2]
        renamed = {path: temporary_path(path, mark) for path in (data, tokenizer, weights, index)}
        found = {path: p for path, p in renamed.items() if p.is_file() and not p.is_symlink()}
        source = found.get(data, data)
        if index.exists() or index not in found or source.is_symlink():  # which no preparation writes
            continue
        with suppress(UserError):  # for a dataset that is not whole
            IndexedDataset(left, files=(source, left))
            for path, partial in found.items():
                partial.rename(path)
            say(f"{prefix}: a preparation that was killed had written all of it; it is in place now", warning=True)
    for left in chain(*map(leftovers_of, (data, index, tokenizer, weights))):
        left.unlink(missing_ok=True)
        say(f"{left}, left by a preparation that was killed, is removed", warning=True)
