"""Folders of arrays in the cache, made once and verified whenever they are opened.

A folder holds one .npy an array, perhaps text files, and a list of their sizes and checksums. All of it is on the disk
before the folder gets its name. What does not match its list is made again. One process makes a folder at a time, and
removes what killed ones left of any folder; where the file system has no locks several may do so, each under a name of
its own.
"""

import json
import os
import platform
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from dtgpt.data.file_array import FileArray, OpenFile, open_npy
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.storage import (
    FileLock,
    Held,
    create_file,
    parse_json,
    read_regular,
    remove_tree,
    sync_path,
    write_text,
)

CONTENTS = "contents.json"
LEFT = re.compile(r"(?:partial-|damaged-|\.)((?:index|text)-[0-9a-f]+)(?:-.+|\.lock)")  # what a killed process leaves
AGAIN = "start again: it is made anew"

Contents = Mapping[str, np.ndarray | str]  # arrays by their names, texts by those of their files


class _Damaged(Exception):
    """Why a folder is not what was written."""


def load_or_make(folder: Path, what: str, make: Callable[[], Contents]) -> dict[str, FileArray]:
    """Return the arrays of `folder`; where it is missing or damaged, write what `make` returns first. Messages call the
    arrays `what`. Raises UserError where they cannot be written."""
    found = _load(folder)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder) as lock:
            if not lock.problem:
                found = _load(folder)  # another process has made it while this one waited
                _remove_left(folder.parent, folder.name)
            if found is None:
                _tell_damage(folder)
                _write(folder, make())
                found = _load(folder)
    except OSError as error:
        advice = remedy(error, "make it writable")
        raise UserError(
            f"{what} cannot be cached in {folder.parent} ({error}); {advice}, or set DTGPT_CACHE to another folder"
        ) from None
    if found is None:
        raise UserError(f"{folder} does not hold what was just written; free or change the disk, or set DTGPT_CACHE")
    return found


def _load(folder: Path) -> dict[str, FileArray] | None:
    """None where there is nothing, or not what was written."""
    with suppress(FileNotFoundError, NotADirectoryError, _Damaged):
        return _verified(folder)
    return None


def _tell_damage(folder: Path) -> None:
    try:
        _verified(folder)
    except FileNotFoundError:
        pass
    except _Damaged as reason:
        say(f"{folder} is damaged ({reason}); it is made again", warning=True)


def _verified(folder: Path) -> dict[str, FileArray]:
    """Raises FileNotFoundError where there is no folder."""
    folder.stat()
    path = folder / CONTENTS
    try:
        listed = parse_json(read_regular(path))
        if not isinstance(listed, dict) or not listed:
            raise _Damaged(f"{CONTENTS} lists nothing")
        arrays = {}
        for name, written in listed.items():
            path = _file(folder, name)
            file = OpenFile(path, AGAIN)
            if _checksum(file) != written:
                raise _Damaged(f"{path.name} is not what was written")
            if path.suffix == ".npy":
                arrays[name] = open_npy(file)
        return arrays
    except (OSError, ValueError, UserError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _Damaged(f"{path.name} cannot be read: {reason}") from None


def _file(folder: Path, name: str) -> Path:
    return folder / (name if "." in name else f"{name}.npy")


def _checksum(file: OpenFile) -> list[int]:
    """Bytes and CRC-32."""
    value = 0
    for chunk in file.chunks():
        value = zlib.crc32(chunk, value)
    return [file.size, value]


def _write(folder: Path, contents: Contents) -> None:
    """Write beside `folder` and rename; what was there, damaged, goes away. Raises OSError."""
    mark = f"{folder.name}-{platform.node()}-{os.getpid()}"
    partial, old = folder.with_name(f"partial-{mark}"), folder.with_name(f"damaged-{mark}")
    try:
        remove_tree(partial)  # of a killed process that had the same number, or planted there
        partial.mkdir()
        for name, value in contents.items():
            if isinstance(value, str):
                write_text(_file(partial, name), value)
                continue
            with create_file(_file(partial, name)) as file:
                np.save(file, value)
                file.flush()
                os.fsync(file.fileno())
        sums = {name: _checksum(OpenFile(_file(partial, name))) for name in contents}
        write_text(partial / CONTENTS, json.dumps(sums))
        sync_path(partial)
        _exchange(partial, folder, old)
        sync_path(folder.parent)
    finally:
        for path in (partial, old):
            remove_tree(path)


def _exchange(partial: Path, folder: Path, old: Path) -> None:
    """Give `partial` its name, unless another process was faster with the same content."""
    if folder.exists() and _load(folder) is None:
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if _load(folder) is None:
            raise


@contextmanager
def _alone(folder: Path) -> Iterator[FileLock]:
    """No other process makes `folder` within the context, where the file system has locks."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(_lock(folder))
        except Held as held:
            say(f"{folder} is being made by {held}; waiting for it")
            lock = stack.enter_context(_lock(folder, wait=True))
        yield lock


def _lock(folder: Path, wait: bool = False) -> FileLock:
    return FileLock(folder.with_name(f".{folder.name}.lock"), wait, remove=True)


def _remove_left(cache: Path, own: str) -> None:
    """Remove what killed processes left. Whoever makes a folder holds its lock from before it writes until nothing is
    left: without a holder nobody is at work. The lock of `own` is held by this process."""
    for path in cache.iterdir():
        named = LEFT.fullmatch(path.name)
        if not named:
            continue
        if named[1] == own:
            if path.is_dir():
                remove_tree(path)
            continue
        with suppress(OSError, Held, UserError), _lock(cache / named[1]) as lock:
            if not lock.problem and path.is_dir():
                remove_tree(path)
