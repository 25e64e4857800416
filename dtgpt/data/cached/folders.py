"""Folders of the cache: arrays, and texts beside them, that are computed once and verified whenever they are opened.

Tokens of a text are a function of the text and of options, and take minutes to make; a digest of these names their
folder. It holds one .npy per array, perhaps text files, and a list of their sizes and checksums; one that does not
match its list is made again: a disk may lose what a killed machine wrote. One process makes a folder at a time, and the
others wait for it; where the file system cannot lock, several may make it, and the first one's stays."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dtgpt.data.cached.file_array import FileArray, open_cached
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.shared.folders import atomic_folder
from dtgpt.util.storage import FileLock, Held, parse_json, read_regular, remove_tree, write_text

CONTENTS = "contents.json"
INDEX_FORMAT = 1  # of indexes of samples; raise when the same settings would give other arrays
# What a killed process leaves, of this version or of one before.
LEFT = re.compile(r"\.(?:partial-)?((?:index|text)-[0-9a-f]+)(?:-.+|\.lock|\.[0-9a-f]{8}\.new)")

Contents = Mapping[str, np.ndarray | str]  # arrays by their names, texts by those of their files


def load_or_make(folder: Path, what: str, make: Callable[[], Contents]) -> dict[str, Any]:
    """Return the arrays of `folder`; if it is missing or damaged, write what `make` returns first. Messages call the
    arrays `what`. Raises UserError if they cannot be written."""
    found = _load(folder)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(folder.parent)
        with _lock(folder, wait=True):
            found = _load(folder, warn=True)  # again: another process may have made it while this one waited
            if found is None:
                _write(folder, make())
                found = _load(folder)
    except OSError as error:
        # numpy, too, gives no number where a disk is full or a file too large.
        advice = remedy(error, "make it writable" if error.errno else "free space there")
        raise UserError(
            f"{what} cannot be cached in {folder.parent} ({error}); {advice}, or set DTGPT_CACHE to another folder"
        ) from None
    if found is None:
        raise UserError(f"{folder} does not hold what was just written; free or change the disk, or set DTGPT_CACHE")
    return found


def cached_index(
    cache: Path | None, settings: Mapping[str, object], build: Callable[[], dict[str, np.ndarray]]
) -> Mapping[str, FileArray | np.ndarray]:
    """Return the arrays that `build` makes from `settings` (JSON values), from the cache if there is one. Raises
    UserError."""
    if cache is None:
        return build()
    text = json.dumps({"format": INDEX_FORMAT, **settings}, sort_keys=True, default=int)
    folder = cache / f"index-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return load_or_make(folder, "the index of samples", build)


def _load(folder: Path, warn: bool = False) -> dict[str, Any] | None:
    """Return None if there is no folder, or if it is damaged."""
    if not os.path.exists(folder):
        return None
    path = folder / CONTENTS
    try:
        listed = parse_json(read_regular(path))
        if not isinstance(listed, dict) or not listed:
            raise ValueError("it lists nothing")
        arrays = {}
        for name, written in listed.items():
            path = _file(folder, name)
            file = open_cached(path)
            if file.checksum() != written:
                raise ValueError("it is not what was written")
            if path.suffix == ".npy":
                arrays[name] = file.array()
        return arrays
    except (OSError, ValueError, UserError) as error:
        if warn:
            reason = getattr(error, "strerror", None) or error
            say(f"{folder} is damaged ({path.name}: {reason}); it is made again", warning=True)
        return None


def _file(folder: Path, name: str) -> Path:
    return folder / (name if "." in name else f"{name}.npy")


def _write(folder: Path, contents: Contents) -> None:
    """Write a folder, in place of a damaged one. Raises OSError."""
    try:
        with atomic_folder(folder) as partial:
            for name, value in contents.items():
                if isinstance(value, str):
                    _file(partial, name).write_text(value)
                else:
                    np.save(_file(partial, name), value)
            sums = {name: open_cached(_file(partial, name)).checksum() for name in contents}
            write_text(partial / CONTENTS, json.dumps(sums))
            if _load(folder) is None:
                remove_tree(folder)
    except OSError:
        if _load(folder) is None:  # otherwise another process was faster, without locks
            raise


def _lock(folder: Path, wait: bool = False) -> FileLock:
    return FileLock(folder.with_name(f".{folder.name}.lock"), wait, remove=True)


def _remove_left(cache: Path) -> None:
    """Remove what killed processes left. A process that makes a folder holds its lock until nothing is left."""
    for path in cache.iterdir():
        if named := LEFT.fullmatch(path.name):
            with suppress(OSError, Held, UserError), _lock(cache / named[1]) as lock:
                if not lock.problem and path.is_dir():
                    remove_tree(path)
