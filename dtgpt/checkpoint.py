"""Save and resume: safetensors for tensors, JSON for the rest, no pickle.

A checkpoint is a folder `step_00000100` with `weights.safetensors` (fp32 masters by parameter name, tied weights
once), `optimizer.safetensors` (`NAME.exp_avg`, `NAME.exp_avg_sq`) and `state.json`. It is written under another
name and renamed when whole.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dtgpt.errors import UserError
from dtgpt.loss_scale import check_state
from dtgpt.model import GPTConfig, unique_parameters
from dtgpt.ops.adamw import AdamW
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards, slices

MOMENTS = ("exp_avg", "exp_avg_sq")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def save_checkpoint(
    checkpoints: Path,
    step: int,
    config: GPTConfig,
    shards: Shards,
    optimizer: AdamW,
    state: dict[str, Any],
    keep_last: int = 0,
) -> None:
    """Write the checkpoint of `step` (optimizer steps done). Then remove all but the newest `keep_last` (0: none).

    Every rank calls it; rank 0 gathers and writes, and the others learn of its failure.
    """
    mesh, folder = shards.mesh, step_folder(checkpoints, step)
    partial = checkpoints / f".partial-{folder.name}-{os.getpid()}"
    try:
        mesh.on_rank_0(lambda: _make_partial(checkpoints, partial))
        _save(partial / "weights.safetensors", mesh, shards.gather(lambda shard: shard.local))
        moments = (
            (f"{name}.{moment}", tensor)
            for moment in MOMENTS
            for name, tensor in shards.gather(lambda shard, m=moment: getattr(optimizer, m)[shard.index])
        )
        _save(partial / "optimizer.safetensors", mesh, moments)
        mesh.on_rank_0(lambda: _finish(partial, folder, {"step": step, "model": asdict(config), **state}))
    except BaseException:
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in list_checkpoints(checkpoints)[:-keep_last] if keep_last and mesh.rank == 0 else []:
        shutil.rmtree(old, ignore_errors=True)


def _make_partial(checkpoints: Path, partial: Path) -> None:
    for leftover in checkpoints.glob(".partial-*"):  # of a process that was killed while it saved
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)


def _save(path: Path, mesh: Mesh, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    whole = dict(tensors)  # every rank takes part in gathering
    mesh.on_rank_0(lambda: save_file(whole, path))


def _finish(partial: Path, folder: Path, state: dict[str, Any]) -> None:
    (partial / "state.json").write_text(json.dumps(state, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Oldest first; what has another name, or is no folder, is not ours."""
    ours = [p for p in checkpoints.glob("step_*") if re.fullmatch(r"step_\d+", p.name) and p.is_dir()]
    return sorted(ours, key=lambda p: int(p.name.removeprefix("step_")))


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run folder; raises UserError where there is none."""
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise UserError(f"{run} has no checkpoint; give a run folder that holds checkpoints/step_...")
    return found[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `state.json` says: step, updates, consumed_samples, data_digest, the model's config, and of a run in fp16
    its loss scale."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
        GPTConfig(**state["model"]).validate()
        state.setdefault("updates", state["step"])  # every step was one before there was fp16
        counts = state["step"], state["consumed_samples"], state["updates"]
        if not all(isinstance(n, int) and n >= 0 for n in counts) or not isinstance(state["data_digest"], str):
            raise ValueError("step, consumed_samples and updates must be whole numbers, data_digest a string")
        if state["updates"] > state["step"]:
            raise ValueError(f"{state['updates']} updates are more than the steps")
        check_state(state.get("loss_scale"))
        return state
    except (OSError, ValueError, TypeError, KeyError, UserError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {error}"
    return UserError(f"{path} cannot be read ({reason}); move {path.parent} away to go on from the checkpoint before")


def check_same_model(checkpoint: Path, config: GPTConfig) -> None:
    """Raise UserError, field by field, where the checkpoint's model has another shape. Dropout may change."""
    saved, wanted = read_state(checkpoint)["model"], asdict(config)
    free = {"dropout", "init_std"}
    other = [k for k in wanted if k not in free and saved.get(k) != wanted[k]]
    differences = [f"{k} {saved.get(k)} there, {wanted[k]} here" for k in other]
    if differences:
        raise UserError(f"{checkpoint} holds another model: {'; '.join(differences)}; give the same --model values")


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Copy the checkpoint's weights into a whole `model`, whose shape must agree (`check_same_model`)."""
    with _open(checkpoint / "weights.safetensors") as saved:
        for name, parameter in unique_parameters(model).items():
            part = tuple(map(range, parameter.shape))
            parameter.data.copy_(_read(saved, name, parameter.shape, part, checkpoint))


def load_checkpoint(checkpoint: Path, shards: Shards, optimizer: AdamW) -> dict[str, Any]:
    """Give this rank's shards their weights and `optimizer` its moments, whatever plan wrote them; each rank reads its
    own part. Returns the saved state."""
    state = read_state(checkpoint)
    with _open(checkpoint / "weights.safetensors") as weights, _open(checkpoint / "optimizer.safetensors") as saved:
        for shard in shards:
            place = (shard.parameter.shape, shard.part, checkpoint)
            shard.local.copy_(_read(weights, shard.name, *place))
            for moment in MOMENTS:
                getattr(optimizer, moment)[shard.index].copy_(_read(saved, f"{shard.name}.{moment}", *place))
    shards.publish()
    return state


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _read(saved: safe_open, name: str, shape: Sequence[int], part: tuple[range, ...], checkpoint: Path) -> Tensor:
    """The elements `part` of the saved tensor `name`, whose whole shape must be `shape`."""
    found = saved.get_slice(name) if name in set(saved.keys()) else None
    if found is None or tuple(found.get_shape()) != tuple(shape):
        raise UserError(f"{checkpoint} has no {name} of shape {tuple(shape)}; it is of another model")
    if not all(map(len, part)):
        return torch.empty([len(r) for r in part])
    return found[slices(part)]
