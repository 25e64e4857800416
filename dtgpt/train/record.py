"""What a plan does in some steps, as one process can be compared with it: losses, norms, rates, whole tensors."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.shards import Shard, slices
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.train.trace import FP8_EPS, trace_in_float64, traced
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
    # "first gradient/NAME", "last gradient/NAME", "weight/NAME"; of a traced run "first update/NAME", too
    tensors: dict[str, Tensor]
    stale: list[str] = field(default_factory=list)  # parameters whose 16-bit copy is not that of the new weights
    fp8: bool = False  # whether products are in fp8

    @property
    def eps(self) -> float:
        """The relative distance of neighbours in the type of the activations."""
        return torch.finfo(getattr(torch, self.dtype.removeprefix("torch."))).eps

    @property
    def eps_of_products(self) -> float:
        """The same of what products take."""
        return FP8_EPS if self.fp8 else self.eps

    @property
    def travel(self) -> float:
        """How far the optimizer may have moved a weight."""
        return sum(self.rates)


@dataclass(frozen=True)
class Tracing:
    """What a run leaves for `dtgpt.train.gate` beside its record.

    file: where the first step is traced. shared: the weights and the state of the optimizer from which the last step of
    every run begins; the reference writes it. is_reference: whether this run does, and computes the first step in
    float64. moved: by which seed weights are moved before the first and the last step; 0: not at all.
    """

    file: Path
    shared: Path
    is_reference: bool
    moved: int = 0


def record(
    trainer: Trainer, steps: int, after_step: Callable[[], None] = lambda: None, tracing: Tracing | None = None
) -> Record | None:
    """Train `steps` steps, in each process of the plan, and return the record on rank 0. `after_step` is called after
    each. With `tracing`, the first step is traced, and the last one begins from the weights of the reference."""
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
    stale: list[str] = []
    if tracing is not None and tracing.is_reference:
        trace_in_float64(trainer, tracing.file)
    for step in range(steps):
        if tracing is not None and 0 < step == steps - 1:
            share_state(trainer, tracing)
        with nullcontext() if tracing is None or step > 0 else traced(trainer, tracing.file):
            loss = trainer.gradients()
        if step == 0:
            keep("first gradient", trainer.gradient)
        if step == steps - 1:
            keep("last gradient", trainer.gradient)
        before = {} if tracing is None or step > 0 else {s.index: s.local.to("cpu", copy=True) for s in trainer.shards}
        result = trainer.update(loss)
        if before:
            keep("first update", partial(moved_by, before))
            for name in shared_states(trainer):
                keep(f"first {name}", partial(state_of, optimizer.rule, name))
            stale = stale_copies(trainer)
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
        stale=stale,
        fp8=trainer.settings.fp8,
    )
    return made if mesh.rank == 0 else None


def moved_by(before: Mapping[int, Tensor], shard: Shard) -> Tensor:
    """Return by how much an update has moved a shard from what it was, by its index."""
    return shard.local.cpu() - before[shard.index]


def state_of(rule: Optimizer, name: str, shard: Shard) -> Tensor:
    """Return the part of the optimizer's state that has this name."""
    return rule.state(shard.index)[name]


def shared_states(trainer: Trainer) -> list[str]:
    """Return the names of the optimizer's state that every shard has, with the shard's shape."""
    states = [(shard, trainer.optimizer.rule.state(shard.index)) for shard in trainer.shards]
    fitting = [{name for name, value in state.items() if value.shape == shard.local.shape} for shard, state in states]
    return sorted(set.intersection(*map(set, trainer.mesh.gather(set.intersection(*fitting)))))


def stale_copies(trainer: Trainer) -> list[str]:
    """Return the parameters of which any rank computes with another copy than that of its own weights."""
    pairs = [(shard, shard.low_precision) for shard in trainer.shards]
    own = [s.name for s, copy in pairs if copy is not None and not torch.equal(copy, s.local.to(copy.dtype))]
    return sorted({name for names in trainer.mesh.gather(own) for name in names})


@torch.no_grad()
def share_state(trainer: Trainer, tracing: Tracing) -> None:
    """Write the weights and the state of the optimizer, or take those that the reference has written, so that the next
    step of each run begins with the same ones."""
    rule, names = trainer.optimizer.rule, shared_states(trainer)
    values: dict[str, Callable[[Shard], Tensor]] = {"weight": attrgetter("local")}
    values |= {name: partial(state_of, rule, name) for name in names}
    if tracing.is_reference:
        kept = {f"{kind}/{name}": t for kind, v in values.items() for name, t in trainer.shards.gather(v)}
        numbers = json.dumps(trainer.optimizer.state())
        save_file({k: t for k, t in kept.items() if t is not None}, tracing.shared, metadata={"state": numbers})
        return
    with safe_open(tracing.shared, "pt") as saved:
        for kind, value in values.items():
            for shard in trainer.shards:
                value(shard).copy_(saved.get_slice(f"{kind}/{shard.name}")[slices(shard.region)])
        trainer.optimizer.restore(json.loads(saved.metadata()["state"]))
    trainer.shards.publish()
    if tracing.moved:
        move_weights(trainer, tracing.moved)


def rounding_of(settings: Settings) -> Rounding:
    """Return how a step rounds otherwise than one process does."""
    plan = settings.plan
    if plan.tp > 1 or plan.cp > 1 or plan.splits_backward:
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
