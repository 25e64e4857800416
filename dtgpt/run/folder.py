"""The run folder: what was asked for, on what it ran, and what came out.

runs/gpt2_tiny-001/
  recipe.json  environment.json  starts.jsonl  tokenizer.json  metrics.jsonl  loss.png  lock  samples/  checkpoints/

A run is its folder: commands take the path, and all that they know of a run stands in these files. Three things are to
be known before. A folder is a run from the moment in which it has a recipe.json. One process at a time trains it, which
holds the `lock`. And a user may move or remove it while it is trained: then nothing more may be written.
"""

import os
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.manifest import STATE, list_checkpoints
from dtgpt.config.execution import Settings
from dtgpt.config.overrides import leaves
from dtgpt.data.dataset import Dataset
from dtgpt.parallel.launch import code_digests
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.hardware import environment
from dtgpt.util.peers import Process
from dtgpt.util.storage import FileLock, Held, did_you_mean, remove_leftovers, write_json

EXAMPLE = "give a run folder such as runs/gpt2_tiny-001"
LOOK = 1.0  # s between two looks at whether the folder is still there
AUTO = "auto"  # as --resume: the newest run of the recipe's name


def check_runs(runs: Path) -> None:
    """Raise UserError where no run folder can be made in `runs`, as far as permissions tell."""
    place = next(str(p) for p in (runs.absolute(), *runs.absolute().parents) if os.path.exists(p))
    if not os.access(place, os.W_OK | os.X_OK):
        raise _cannot_be_made(runs, f"{place} cannot be written")


def create_run(runs: Path, name: str) -> Path:
    """Make and return the first free folder of `runs/NAME-001`, `runs/NAME-002`, ..."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name.removeprefix(f"{name}-")) for p in run_folders(runs, name)), default=0)
        while True:
            folder = runs / f"{name}-{number:03d}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another run began at the same moment
                number += 1
    except OSError as error:
        raise _cannot_be_made(runs, error.strerror) from None


def _cannot_be_made(runs: Path, reason: str | None) -> UserError:
    return UserError(f"runs={runs}: no run folder can be made there ({reason}); give another --runs")


def open_run(folder: Path) -> Path:
    """Return the folder. Raise UserError where it is not a run folder."""
    if not (folder / "recipe.json").is_file():
        if os.path.lexists(folder):
            raise UserError(f"{folder} is not a run folder (it has no recipe.json); {EXAMPLE}")
        raise UserError(f"{folder} does not exist; {did_you_mean(folder, EXAMPLE)}")
    return folder


def run_to_resume(resume: str | None, runs: Path, name: str) -> tuple[Path | None, Path | None]:
    """Return the run folder and the checkpoint that `resume` of a recipe names, each None if it names none. Raise
    UserError for a path that is neither."""
    if resume is None:
        return None, None
    if resume == AUTO:
        missing = "resume=auto needs a capability, which is not here; name the run with --resume"
        return seams.first("newest_runs", missing).find(runs, name), None
    path = Path(resume)
    if ".." in path.parts:  # whose last part may be no name
        path = path.resolve()
    if path.absolute().parent.name == "checkpoints" != path.parent.name:  # from within the folder
        path = path.absolute()
    if path.parent.name == "checkpoints":
        run, there = open_run(path.parents[1]), ", ".join(p.name for p in list_checkpoints(path.parent))
        if not path.is_dir():
            raise UserError(f"{run} has no checkpoint {path.name}; give one of {there or 'another run'}")
        if not (path / STATE).is_file() and path not in list_checkpoints(path.parent):
            raise UserError(f"{path} is neither a run nor a checkpoint; give {run}, or one of {there or 'another run'}")
        return run, path
    if (path / STATE).is_file():
        raise UserError(f"{path} is a checkpoint without its run; begin a new run with --init_from {path}")
    return open_run(path), None


def run_folders(runs: Path, name: str) -> list[Path]:
    """Return the folders NAME-001, NAME-002, ..., oldest first."""
    ours = [p for p in runs.glob(f"{name}-*") if re.fullmatch(r"\d{3,}", p.name.removeprefix(f"{name}-"))]
    return sorted(ours, key=lambda p: int(p.name.removeprefix(f"{name}-")))


class RunLock(ExitStack):
    """The lock of this process on its run folder: a context that frees what `take` has locked."""

    def __init__(self) -> None:
        super().__init__()
        self._lock: FileLock | None = None
        self._next, self._lost = 0.0, False  # when to look again, and what was seen

    def take(self, folder: Path) -> Path:
        """Lock `folder`, and return it. Raise UserError where another process has it."""
        lock = FileLock(folder / "lock")
        try:
            self._lock = self.enter_context(lock)
        except Held as held:
            raise UserError(
                f"{folder} is being trained by {held}; wait for it or end it, or leave --resume out"
            ) from None
        except OSError as error:
            raise UserError(
                f"{lock.path} cannot be written ({error.strerror}); {remedy(error, 'choose another run')}"
            ) from None
        checkpoints = folder / "checkpoints"
        if checkpoints.exists() and not os.access(checkpoints, os.W_OK | os.X_OK):
            raise UserError(f"{checkpoints} cannot be written, where the run saves; make it writable")
        if lock.problem:
            say(f"{folder} cannot be locked ({lock.problem}): let no other process train it", warning=True)
        else:
            for written in (folder, folder / "samples", folder / "checkpoints"):
                remove_leftovers(written)
        return folder

    def lost(self, at_once: bool = False) -> bool:
        """Return whether the folder was moved, removed or replaced. Looks once a second, unless `at_once`."""
        if self._lock is not None and not self._lost and (at_once or time.monotonic() >= self._next):
            self._next = time.monotonic() + LOOK
            self._lost = not self._lock.is_there()
        return self._lost


def values_of(recipe: Any) -> dict[str, Any]:
    """Return the value of every field, by dotted name."""
    return {name: value for name, _, _, value in leaves(recipe)}


def describe_run(
    folder: Path, recipe: dict[str, Any], settings: Settings, mesh: Mesh, data: Dataset, step: int
) -> None:
    """Write what is asked for, on what it runs, and the tokenizer, of a run that begins or goes on after `step`:
    `folder` is a run folder then. A capability that keeps what former starts were (`former_starts`) is asked before."""
    tokenizer = data.tokenizer
    here = {
        **environment(mesh.device),
        "world": mesh.world,
        "waiting": max(0, Process.from_environment().world - mesh.world),
        "plan": mesh.plan.name,
        "data": {
            "source": data.source,
            "digest": data.digest,
            "tokenizer": tokenizer.name,
            "tokens": tokenizer.vocab_size,
        },
        "code": code_digests(),
    }
    for keep in seams.listed("former_starts"):
        keep(folder, recipe, here, settings, step)
    write_json(folder / "recipe.json", recipe)
    write_json(folder / "environment.json", here)
    tokenizer.save(folder / "tokenizer.json")
