"""The folder that a user asked for, whole or not there at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtgpt.util.errors import UserError, remedy
from dtgpt.util.shared.folders import atomic_folder
from dtgpt.util.shared.output_files import leftovers_of
from dtgpt.util.storage import FileLock, Held, remove_tree


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Do what `atomic_folder` does for a folder that the user asked for: raise UserError instead of OSError, also where
    another process writes it, and remove what a killed one left of it."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"), remove=True)
    try:
        _check_new(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            _check_new(folder)  # again: another process may just have written it
            for left in [] if lock.problem else leftovers_of(folder):
                remove_tree(left)
            with atomic_folder(folder) as partial:
                yield partial
    except Held as held:
        raise UserError(f"{folder} is being written by {held}; wait for it or end it, or give another path") from None
    except OSError as error:
        # A library that reports a full disk in its own words gives no number.
        advice = remedy(error, "check the disk" if error.errno else "free space there")
        raise UserError(f"{folder} cannot be written ({error}); {advice}, or give another path") from None


def _check_new(folder: Path) -> None:
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; give another path")
