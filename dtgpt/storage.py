"""Small files and names on the disk that are never half there."""

import json
import os
from pathlib import Path
from typing import Any


def sync_folder(path: Path) -> None:
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
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_tree(folder: Path) -> None:
    """Wait until all files below a folder are on the disk, and their names."""
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, default=repr) + "\n")
