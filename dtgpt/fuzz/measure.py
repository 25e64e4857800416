"""What a rank does with a case: a few steps, an evaluation, and digests of all that copies must agree in."""

import hashlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dtgpt.fuzz.case import Case, Setting
from dtgpt.train.compare import Record, record
from dtgpt.train.startup import open_trainer
from dtgpt.train.trainer import Trainer


class Seen(NamedTuple):
    """What one rank saw."""

    record: Record | None  # of the plan, on rank 0
    held_out: float | None  # mean loss
    dp: int  # the coordinate of this rank
    samples: list[list[tuple[int, str]]]  # (sample, digest of its tokens) of each step
    copies: list[tuple[str, str]]  # (name and region, digest) of each tensor that this rank holds


Run = Literal["plan", "reference", "exact", "moved"]


def measure(setting: Setting, case: Case, run: Run) -> Seen | None:
    """Train all steps of a case: in each process of its plan, or on one process as its reference. To know what rounding
    does to the case: on one process in fp32 (`exact`; None if the case is in fp32), or from initial weights that are
    `moved` by a last bit."""
    make = {"plan": setting.recipe_of, "exact": setting.exact_of}.get(run, setting.reference_of)
    recipe = make(case)
    if recipe is None:
        return None
    with open_trainer(recipe) as trainer:
        if run == "moved":
            _move_weights(trainer)
        samples = _note_samples(trainer)
        made = record(trainer, recipe.num_steps)
        held_out = trainer.held_out_loss()
        return Seen(made, held_out and held_out[0], trainer.mesh.place.dp, samples, _copies(trainer))


@torch.no_grad()
def _move_weights(trainer: Trainer) -> None:
    """Add or subtract 2^-23 of each initial weight, half of them each, on one process in fp32."""
    generator = torch.Generator().manual_seed(0)
    for shard in trainer.shards:
        up = torch.rand(shard.local.shape, generator=generator) < 0.5
        shard.local.mul_(torch.where(up, 1 + 2.0**-23, 1 - 2.0**-23).to(shard.local.device))


def _note_samples(trainer: Trainer) -> list[list[tuple[int, str]]]:
    """Return a list to which every later step adds its samples."""
    steps: list[list[tuple[int, str]]] = []
    take = trainer.batches.take

    def noted(step: int) -> tuple[Tensor, ...]:
        windows, sample_ids, _ = taken = take(step)
        steps.append(list(zip(sample_ids.tolist(), map(digest, windows), strict=True)))
        return taken

    trainer.batches.take = noted  # type: ignore[method-assign]
    return steps


def _copies(trainer: Trainer) -> list[tuple[str, str]]:
    found = []
    for shard in trainer.shards:
        where = f"{shard.name} {[(part.start, part.stop) for part in shard.region]}"
        found.append((where, digest(shard.local)))
        if shard.low_precision is not None:
            found.append((f"{where} in 16 bits", digest(shard.low_precision.float())))
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
