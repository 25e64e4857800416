"""Folders that are there whole, or not at all."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtgpt.util.storage import remove_tree, sync_path, temporary_path


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield another folder to fill; it is called `folder` when the context ends and all in it is on the disk. If the
    context fails, nothing is left. Raises OSError."""
    partial = temporary_path(folder, secrets.token_hex(4))
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            sync_path(path)
        partial.rename(folder)
        sync_path(folder.parent)
    finally:
        remove_tree(partial)
