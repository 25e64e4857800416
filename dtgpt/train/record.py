"""What a plan does in some steps, as one process can be compared with it: losses, norms, rates, whole tensors."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.parallel.shards import Shard
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.train.trainer import Trainer
from dtgpt.util.hardware import peak_memory

# How a step of a plan rounds otherwise than one process with the same micro-batches: it only adds gradients in another
# order, in fp32; adds them in 16 bits where weights have 16 bits; or also computes products in other pieces. With
# `--reduce exact` it may have the same bits.
Rounding = Literal["none", "order", "sums", "products"]


@dataclass
class Record:
    """What one plan did, whole tensors on the CPU; gathered on rank 0."""

    dtype: str
    rounding: Rounding
    losses: list[float]  # of each step, as the following three
    norms: list[float]  # of the gradient; infinite in a step that fp16 skips
    rates: list[float]  # learning rates
    scales: list[float]  # loss scales after the step; none but in fp16
    memory: list[float]  # peak of each rank in GiB
    planned: float | None  # what `dtgpt plan` says of the fullest rank; None on a CPU, whose memory is not counted so
    initial: str  # digest of the initial weights
    tensors: dict[str, Tensor]  # "first gradient/NAME", "last gradient/NAME", "weight/NAME"

    @property
    def travel(self) -> float:
        """How far the optimizer may have moved a weight."""
        return sum(self.rates)


def record(trainer: Trainer, steps: int, after_step: Callable[[], None] = lambda: None) -> Record | None:
    """Train `steps` steps, in each process of the plan, and return the record on rank 0. `after_step` is called after
    each."""
    mesh, settings, optimizer = trainer.mesh, trainer.settings, trainer.optimizer
    kept: dict[str, Tensor] = {}

    def keep(kind: str, value: Callable[[Shard], Tensor]) -> None:
        for name, whole in trainer.shards.gather(value):
            if whole is not None:
                kept[f"{kind}/{name}"] = settings.model.comparable(name, whole)

    digest = hashlib.sha256()
    losses: list[float] = []
    norms: list[float] = []
    rates: list[float] = []
    scales: list[float] = []
    for _, whole in trainer.shards.gather(attrgetter("local")):
        digest.update(b"" if whole is None else whole.numpy().tobytes())
    for step in range(steps):
        loss = trainer.gradients()
        if step == 0:
            keep("first gradient", trainer.gradient)
        if step == steps - 1:
            keep("last gradient", trainer.gradient)
        result = trainer.update(loss)
        losses.append(trainer.mean_loss(result))
        norms.append(result.norm.item())
        rates.append(optimizer.lr.item())
        if optimizer.scaler is not None:
            scales.append(optimizer.scaler.scale.item())
        after_step()
    memory = mesh.gather(peak_memory(mesh.device))
    keep("weight", attrgetter("local"))
    planned = None
    if mesh.device.type == "cuda":
        planned = fullest(memory_by_rank(settings)).total / 2**30
    made = Record(
        dtype=str(settings.dtype),
        rounding=rounding_of(settings),
        losses=losses,
        norms=norms,
        rates=rates,
        scales=scales,
        memory=memory,
        planned=planned,
        initial=digest.hexdigest(),
        tensors=kept,
    )
    return made if mesh.rank == 0 else None


def rounding_of(settings: Settings) -> Rounding:
    """Return how a step rounds otherwise than one process does."""
    plan = settings.plan
    if plan.tp > 1 or plan.splits_backward:
        return "products"
    if settings.reduce == "exact":
        return "none"
    return "order" if plan.world == 1 or (plan.zero and plan.pp == 1) else "sums"


@torch.no_grad()
def move_weights(trainer: Trainer, seed: int = 0) -> None:
    """Add to each initial weight, or subtract from it, what the last bit of the run's type can add: half of them each.
    What follows differs from the run of these weights by rounding alone. Works on one process."""
    bit = max(2.0**-23, torch.finfo(trainer.settings.dtype).eps / 2)
    generator = torch.Generator().manual_seed(seed)
    for shard in trainer.shards:
        up = torch.rand(shard.local.shape, generator=generator) < 0.5
        shard.local.mul_(torch.where(up, 1 + bit, 1 - bit).to(shard.local.device))
    trainer.shards.publish()


def save_record(found: Record | None, file: Path) -> None:
    """Write on rank 0 the record that `read_record` reads."""
    if found is not None:
        values = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "tensors"}
        save_file(found.tensors, file, metadata={"record": json.dumps(values)})


def read_record(file: Path) -> Record:
    """Return what `save_record` wrote."""
    with safe_open(file, "pt") as saved:
        tensors = {key: saved.get_tensor(key) for key in saved.keys()}  # noqa: SIM118
        values = json.loads(saved.metadata()["record"])
    return Record(**values, tensors=tensors)
