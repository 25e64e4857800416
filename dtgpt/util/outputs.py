"""Files and folders that a user asks a command for: refused, in one sentence, before work is spent on what cannot be
written, and never half there."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtgpt.util.errors import UserError, remedy
from dtgpt.util.storage import TEMPORARY, FileLock, Held, atomic_folder, create_file, remove_tree, temporary_path


def leftovers_of(path: Path) -> list[Path]:
    """Return the temporary files or folders that killed processes left of `path`; no other process may be writing
    it."""
    named = ((p, TEMPORARY.fullmatch(p.name)) for p in path.parent.iterdir())
    return sorted(p for p, name in named if name and name[1] == path.name)


def try_to_write(path: Path) -> None:
    """Raise OSError if `atomic_file` could not create its temporary file in the folder of `path`."""
    temporary = temporary_path(path, secrets.token_hex(4))
    create_file(temporary).close()
    temporary.unlink()


def check_can_write(path: Path) -> None:
    """Raise UserError, before work is spent, where `atomic_file` could not write `path`."""
    try:
        try_to_write(path)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror or error}); {remedy(error, 'give another path')}")


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
