"""Results of a command as a JSON file, whose name an option gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtgpt.util.console import say
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.shared.output_files import check_can_write
from dtgpt.util.storage import write_json


def check_output(path: Path, option: str, usual: str, data: Sequence[Path] = ()) -> None:
    """Raise UserError, before anything is computed, where results cannot be written to `path`, which `option` gives, or
    would take the place of `data`. usual: name of such a file."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file, such as {path / usual}")
    if path.exists() and not path.is_file():
        raise UserError(f"{option} {path} is not a regular file; name one, such as {usual}")
    if path.exists() and any(one.exists() and path.samefile(one) for one in data):
        raise UserError(f"{option} {path} is the data, which it would replace; name another file, such as {usual}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{option} {path} is in {folder}, which is not a folder; make it, or give another path")
    check_can_write(path)


def write_results(path: Path, option: str, results: dict[str, Any]) -> None:
    """Write results as JSON, whole or not at all. Raise UserError where that fails."""
    try:
        write_json(path, results)
    except OSError as error:
        advice = remedy(error, "check the disk")
        raise UserError(f"{path} cannot be written ({error.strerror or error}); {advice}, or give {option}") from None
    say(f"results -> {path}")
