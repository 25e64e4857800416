"""Where `--resume auto` goes on, and why it begins a new run."""

import os
from pathlib import Path

from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.run.folder import run_folders
from dtgpt.util.errors import UserError, remedy


class NewestRun:
    """The newest run of a name that has a checkpoint."""

    def find(self, runs: Path, name: str) -> Path | None:
        """Return the newest run of this name; None where it has no checkpoint. Raise UserError where that cannot be
        seen."""
        check_can_be_listed(runs)
        begun = [p for p in run_folders(runs, name) if (p / "recipe.json").is_file()]
        if not begun:
            return None
        check_can_be_listed(begun[-1] / "checkpoints")
        return begun[-1] if list_checkpoints(begun[-1] / "checkpoints") else None

    def why_new(self, runs: Path, name: str) -> str:
        """Return why `resume=auto` begins a new run of this name."""
        older = run_folders(runs, name)
        if not older:
            return f"{runs} holds no run of {name} to resume; a new run begins"
        return f"{older[-1]}, the newest run of {name}, holds no checkpoint to resume; a new run begins"


def check_can_be_listed(folder: Path) -> None:
    """Raise UserError where a folder exists, or a link to one that is not mounted, and cannot be listed: `Path.glob`
    takes it for an empty one."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return
        advice = remedy(error, "give another --runs")
        raise UserError(f"resume=auto, but {folder} cannot be listed ({error.strerror}); {advice}") from None


NEWEST = NewestRun()
