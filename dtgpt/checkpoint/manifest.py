"""The folder of one checkpoint: what it is called, what it says of itself, and whether it still is what was written.

One `torch.save` of everything would be shorter. But a pickle executes what its file says, one file is written by one
rank, and damage would go unnoticed. So tensors are pieces in safetensors files, all else is JSON, and every file is
listed with its size and digest.

checkpoints/
  latest                                the name of the newest one, for people and scripts
  step_00000100/
    state.json                          everything but tensors, with the size and sha256 of every file below
    weights-00000-000.safetensors       fp32 weights by parameter name: file 000 of rank 00000
    optimizer-00000-000.safetensors     state of the optimizer, NAME.exp_avg and others

See docs/checkpoints.md. There is no pickle in it, and no name in it is used as a path before it was checked.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.shard_file import Damaged, Piece, Written, read_header, verification
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import FIRST, ModelConfig, describe_class, is_users, saved_class
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import read_regular, remove_tree, sync_path, write_text

FORMAT = "dtgpt checkpoint"
VERSION = 1  # of the format: one more where an older dtgpt would misread what is written; all up to this one are read
STATE = "state.json"
LATEST = "latest"  # the name of the newest checkpoint, for people and scripts
LARGEST_STATE = 1 << 26  # bytes
READERS = min(16, os.cpu_count() or 1)  # threads that read or hash
VISIBLE_WITHIN = 10.0  # s in which a folder made on one node must be seen on all


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in the folder, oldest first. Anything with another name, or that is not a folder, is left
    out."""
    ours = [p for p in checkpoints.glob("step_*") if re.fullmatch(r"step_\d+", p.name) and p.is_dir()]
    return sorted(ours, key=step_of)


class Checkpoint:
    """An opened checkpoint. Opening it reads `state.json` alone; raises Damaged where that is not what was written.
    weights_alone: leave out the optimizer's files, which may be twice as large. own: class of the model of a recipe,
    which may not be dtgpt's."""

    def __init__(
        self,
        folder: Path,
        weights_alone: bool = False,
        own: type[ModelConfig] | None = None,
    ):
        self.folder = folder
        self.state = read_state(folder, own)
        self.config = saved_model(folder / STATE, self.state, own)
        listed = {name: Written(f["bytes"], f["sha256"]) for name, f in self.state["files"].items()}
        self.files = {name: f for name, f in listed.items() if not (weights_alone and name.startswith("optimizer"))}
        self._pieces: dict[str, list[tuple[str, Piece, int]]] | None = None  # tensor -> where

    @property
    def has_optimizer(self) -> bool:
        return any(name.startswith("optimizer") for name in self.files)

    def problem(self, rank: int = 0, world: int = 1) -> str | None:
        """Return what is wrong with the files, in one sentence, or None where all are what was written. Each of
        `world` ranks checks other files."""
        return verification().damage(self.folder, list(self.files.items())[rank::world])

    def pieces(self, tensor: str) -> list[tuple[str, Piece, int]]:
        """Return (file, piece, position in the file) of all that is saved of a tensor."""
        if self._pieces is None:
            self._pieces = self._read_headers()
        return self._pieces.get(tensor, [])

    def share_headers(self, mesh: Mesh) -> None:
        """Let rank 0 read the headers of all files for everyone: a thousand ranks would else open each other's files a
        million times."""
        self._pieces = mesh.on_rank_0(self._read_headers)

    def _read_headers(self) -> dict[str, list[tuple[str, Piece, int]]]:
        found: dict[str, list[tuple[str, Piece, int]]] = {}
        for name in self.files:
            for piece, position in read_header(self.folder / name):
                found.setdefault(piece.name, []).append((name, piece, position))
        return found

    @property
    def digest(self) -> str:
        """Return the digest of all that `state.json` says."""
        return digest_of(self.state)


def digest_of(state: dict[str, Any]) -> str:
    """Return the digest of what `state.json` says."""
    return hashlib.sha256(text_of(state).encode()).hexdigest()


def text_of(state: dict[str, Any]) -> str:
    """Return the text of `state.json`."""
    return json.dumps(state, indent=2, default=repr) + "\n"  # a plan's own table holds objects


def read_state(folder: Path, own: type[ModelConfig] | None = None) -> dict[str, Any]:
    """Return what `state.json` says, checked: step, updates, consumed_samples, tokens, data_digest, architecture,
    model, optimizer, recipe, files, ... and what a step left to the next one (`optim/update.py`). `own`: class of the
    model of a recipe, which may not be dtgpt's. Raise Damaged, or UserError where a newer dtgpt wrote it, or the class
    of its model is neither dtgpt's nor `own`: these are not damaged, and an older checkpoint must not take their
    place."""
    path = folder / STATE
    with _errors_as_damage(path):
        text = read_regular(path, LARGEST_STATE).decode("utf-8")
        state = json.loads(text)
        if state.get("format") != FORMAT:
            raise ValueError("it is not that of a dtgpt checkpoint in this format")
        if type(state["version"]) is not int or not 1 <= state["version"] < 1 << 62:
            raise ValueError(
                f"the version of its format, version={shown(state['version'])} must be a whole number from 1 on"
            )
        newer = state["version"] > VERSION  # whose digest may be another one
        if not newer:
            verification().text(state, state.pop("digest"), text)
            if type(state.setdefault("architecture", FIRST)) is not str:
                raise ValueError(f"architecture={shown(state['architecture'])} must be of type str")
    if newer:
        held = f"{path} was written by a newer dtgpt in format {state['version']}, this one reads up to {VERSION}"
        raise UserError(f"{held}; use the dtgpt that wrote it")
    if is_users(saved_class(path, state, own)):
        saved_model(path, state, own)
    with _errors_as_damage(path):
        state.setdefault("optimizer", OptimizerConfig.kind)  # that of checkpoints that name none
        verification().state(state, saved_model(path, state, own))
    return state


@contextmanager
def _errors_as_damage(path: Path) -> Iterator[None]:
    """Raise Damaged for what a file that is not what was written may lead to."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
        raise Damaged(path, f"{type(error).__name__}: {error}") from None


def saved_model(path: Path, state: dict[str, Any], own: type[ModelConfig] | None) -> ModelConfig:
    """Return the model of a state. Raise UserError where there is none of its class, or one of a user's own that has
    other fields by now."""
    kind, values = saved_class(path, state, own), state["model"]
    if not is_users(kind):
        return kind(**values)
    try:
        return kind(**{name: as_tuple(value) for name, value in dict(values).items()})
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}; give the recipe file as it was when it was trained") from None


def as_tuple(value: Any) -> Any:
    """Return a value of a field with tuples in place of the lists that JSON makes of them."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def describe_model(config: ModelConfig) -> dict[str, Any]:
    """Return what every checkpoint says of its model and its writer."""
    return {
        **describe_class(type(config)),
        "model": asdict(config),
        "padded_vocab_size": config.padded_vocab_size,
        "versions": {name: value for of_packages in seams.listed("versions") for name, value in of_packages().items()},
    }


def write_state(partial: Path, state: dict[str, Any], files: dict[str, Written]) -> None:
    """Write `state.json`, which makes the folder a checkpoint, when all files are in it."""
    listed = {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in sorted(files.items())}
    whole = {"format": FORMAT, "version": VERSION, **state, "files": listed}
    write_text(partial / STATE, text_of(whole | {"digest": digest_of(whole)}))  # of all before it


def commit(partial: Path, folder: Path, state: dict[str, Any], files: dict[str, Written]) -> None:
    """Make the checkpoint `folder` of one in which all files are. One of an earlier attempt at the same step gives
    way."""
    write_state(partial, state, files)
    # The names in the folder must be on the disk before it has its own: a machine that loses its power right after the
    # rename would else come back with a checkpoint of which files are missing.
    sync_path(partial)
    if os.path.lexists(folder):
        remove(folder)
    # A rename happens at once or not at all: who looks for checkpoints never finds half of one.
    partial.rename(folder)
    sync_path(folder.parent)


def remove(folder: Path) -> None:
    """Rename the folder, then remove it, so that what is left of an interrupted removal is not a checkpoint."""
    gone = folder.with_name(f".removed-{folder.name}")
    remove_tree(gone)  # of a process that was killed while it removed one of this step
    folder.rename(gone)
    remove_tree(gone)


def point_latest(checkpoints: Path, folder: Path) -> None:
    write_text(checkpoints / LATEST, f"{folder.name}\n")


def quarantine_newer(checkpoints: Path, step: int) -> list[str]:
    """Rename checkpoints of later steps than `step`, from which the run resumes: they are damaged, or of another
    history. Return the new names."""
    names = []
    for folder in list_checkpoints(checkpoints):
        if step_of(folder) > step:
            free = (f"aside-{f'{n}-' if n else ''}{folder.name}" for n in count())
            names.append(next(name for name in free if not os.path.lexists(checkpoints / name)))
            folder.rename(checkpoints / names[-1])
    if names and (left := list_checkpoints(checkpoints)):
        point_latest(checkpoints, left[-1])
    return names


def make_folder(checkpoints: Path, step: int) -> Path:
    """Create the folder in which the ranks write a checkpoint, and remove what killed processes left. Two attempts
    never share a name: the other ranks of an attempt whose rank 0 was killed may still write."""
    for leftover in [*checkpoints.glob(".partial-*"), *checkpoints.glob(".removed-*")]:
        remove_tree(leftover)  # of a process that was killed
    partial = checkpoints / f".partial-{step_folder(checkpoints, step).name}-{secrets.token_hex(4)}"
    checkpoints.mkdir(exist_ok=True)  # without parents: a run folder that somebody removed must not come back
    partial.mkdir()
    return partial


def wait_until_visible(folder: Path) -> bool:
    """Wait for a folder that another process made, and return whether it is visible here in time."""
    end = time.monotonic() + VISIBLE_WITHIN
    while not folder.is_dir() and time.monotonic() < end:
        time.sleep(0.05)
    return folder.is_dir()
