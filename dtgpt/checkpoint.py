"""Save and resume: safetensors for tensors, JSON for the rest, no pickle.

A checkpoint is a folder `step_00000100` with `weights.safetensors` (fp32 masters by parameter name, tied weights
once), `optimizer.safetensors` (`NAME.exp_avg`, `NAME.exp_avg_sq`) and `state.json`. It is written under another
name and renamed when whole.
"""

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dtgpt.errors import UserError
from dtgpt.model import GPT, GPTConfig, unique_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def save_checkpoint(
    checkpoints: Path,
    step: int,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep_last: int = 0,
) -> Path:
    """Write the checkpoint of `step` (optimizer steps done) and return its folder. Then remove all but the newest
    `keep_last` (0: none)."""
    folder = step_folder(checkpoints, step)
    partial = checkpoints / f".partial-{folder.name}-{os.getpid()}"
    names = unique_parameters(model)
    moments = {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in names.items()
        for moment in MOMENTS
        if parameter in optimizer.state
    }
    for leftover in checkpoints.glob(".partial-*"):  # of a process that was killed while it saved
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file({name: parameter.detach() for name, parameter in names.items()}, partial / "weights.safetensors")
        save_file(moments, partial / "optimizer.safetensors")
        full_state = {"step": step, "model": asdict(model.config), **state}
        (partial / "state.json").write_text(json.dumps(full_state, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in list_checkpoints(checkpoints)[:-keep_last] if keep_last else []:
        shutil.rmtree(old, ignore_errors=True)
    return folder


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
    """What `state.json` says: step, consumed_samples, data_digest and the model's config."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
        GPTConfig(**state["model"]).validate()
        counts = state["step"], state["consumed_samples"]
        if not all(isinstance(n, int) and n >= 0 for n in counts) or not isinstance(state["data_digest"], str):
            raise ValueError("step and consumed_samples must be whole numbers, data_digest a string")
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
    """Copy the checkpoint's weights into `model`, whose shape must agree (`check_same_model`)."""
    _copy(_read(checkpoint / "weights.safetensors"), unique_parameters(model), checkpoint)


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Give `model` its weights and `optimizer` its moments and step count; returns the saved state."""
    load_weights(checkpoint, model)
    saved, state = _read(checkpoint / "optimizer.safetensors"), read_state(checkpoint)
    for name, parameter in unique_parameters(model).items():
        moments = {moment: torch.empty_like(parameter, requires_grad=False) for moment in MOMENTS}
        _copy(saved, {f"{name}.{moment}": tensor for moment, tensor in moments.items()}, checkpoint)
        step = torch.tensor(float(state["step"]), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
    return state


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


@torch.no_grad()
def _copy(saved: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], checkpoint: Path) -> None:
    for name, target in targets.items():
        if name not in saved or saved[name].shape != target.shape:
            raise UserError(f"{checkpoint} has no {name} of shape {tuple(target.shape)}; it is of another model")
        target.copy_(saved[name])
