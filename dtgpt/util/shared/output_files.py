"""Files that a command writes where its user says: whether they can be written, and what killed commands left of them.

Run folders and checkpoints are the core's own, which makes their folders; see `dtgpt.util.storage`.
"""

import secrets
from pathlib import Path

from dtgpt.util.errors import UserError, remedy
from dtgpt.util.storage import TEMPORARY, create_file, temporary_path


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
