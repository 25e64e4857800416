"""Weights and the optimizer's state that one process writes, and by how much those of another run differ from them.

Each rank holds what it has itself against the file, copies of replicas as well: a momentum that one rank has forgotten
is found on that rank.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.compare.rounding import comparable
from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.optim.update import Update
from dtgpt.parallel.layout import slices
from dtgpt.parallel.shards import Shard
from dtgpt.train.trainer import Trainer

WEIGHT = "weight"


class Apart(NamedTuple):
    """By how much a weight or a state of the optimizer differs from that of one process."""

    step: int  # after which it was held against it
    kind: str  # "weight", or the name of a state
    parameter: str
    difference: float  # ||a - b|| / ||b||, b: one process
    rank: int | None  # whose copy differs most; None: all copies are the same

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.kind} of {self.parameter}{rank} after step {self.step} differs by {self.difference:.1e}"


def state_of(optimizer: Update, name: str, shard: Shard) -> Tensor:
    """Return the part of the optimizer's state that has this name."""
    return optimizer.rule.state(shard.index)[name]


def has_state(optimizer: Update, name: str, shard: Shard) -> bool:
    """Return whether a shard has a state of this name and of its own shape."""
    found = optimizer.rule.state(shard.index).get(name)
    return found is not None and found.shape == shard.local.shape


def names_of_states(trainer: Trainer) -> list[str]:
    """Return the names of all states of the shape of their shard that any shard has, on every rank the same."""
    rule = trainer.optimizer.rule
    own = {name for s in trainer.shards for name, value in rule.state(s.index).items() if value.shape == s.local.shape}
    return sorted(set().union(*trainer.mesh.gather(own)))


def rows_of_states(trainer: Trainer) -> dict[str, Tensor]:
    """Return the values of whole rows in the optimizer's state, each held by one rank, by "STATE/PARAMETER"; on every
    rank those of all ranks."""
    found = {}
    for shard in trainer.shards:
        for name, value in trainer.optimizer.rule.state(shard.index).items():
            if value.dim() < shard.local.dim() and len(value):
                found[f"{name}/{shard.name}"] = value.cpu()
    return {key: value for each in trainer.mesh.gather(found) for key, value in each.items()}


def whole_states(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield ("KIND/PARAMETER", whole tensor) of the weights and the optimizer's state on rank 0; other ranks help."""
    values: dict[str, Callable[[Shard], Tensor]] = {WEIGHT: attrgetter("local")}
    values |= {name: partial(state_of, trainer.optimizer, name) for name in names_of_states(trainer)}
    for kind, value in values.items():
        chosen = None if kind == WEIGHT else partial(has_state, trainer.optimizer, kind)
        for name, whole in gather_whole(trainer.shards, value, chosen):
            if whole is not None:
                yield f"{kind}/{name}", whole


def save_state(trainer: Trainer, file: Path) -> None:
    """Write the weights and the optimizer's state of one process."""
    kept = {**rows_of_states(trainer), **dict(whole_states(trainer))}
    save_file(kept, file, metadata={"state": json.dumps(trainer.optimizer.state())})


def held(trainer: Trainer) -> Iterator[tuple[str, Shard, Tensor]]:
    """Yield (kind, shard, tensor) of the weights and the optimizer's state that this rank holds."""
    for shard in trainer.shards:
        yield WEIGHT, shard, shard.local
        for name, value in trainer.optimizer.rule.state(shard.index).items():
            if len(value) or value.shape == shard.local.shape:
                yield name, shard, value


@torch.no_grad()
def take_state(trainer: Trainer, file: Path) -> None:
    """Take the weights and the optimizer's state that `save_state` wrote. Code of older versions wrote fewer states."""
    with safe_open(file, "pt") as saved:
        known = set(saved.keys())
        for kind, shard, value in held(trainer):
            if (key := f"{kind}/{shard.name}") in known:
                value.copy_(saved.get_slice(key)[slices(shard.place_of(value)[1])])
        trainer.optimizer.restore(json.loads(saved.metadata()["state"]))
    trainer.shards.publish()


def differences(trainer: Trainer, file: Path, travel: float) -> list[Apart]:
    """Return by how much the weights and the optimizer's state of all ranks differ from those that `save_state` wrote,
    the same on every rank. travel: how far the optimizer may have moved a weight, against which its difference is held
    where the weight is smaller."""
    own: dict[tuple[str, str], list[tuple[str, int, float, float, int]]] = {}
    with safe_open(file, "pt") as saved:
        known = set(saved.keys())
        for kind, shard, value in held(trainer):
            if (key := f"{kind}/{shard.name}") in known:
                region = shard.place_of(value)[1]
                apart, size, count = _squares(trainer, shard, value, saved.get_slice(key)[slices(region)], region[0])
                found = str(region), trainer.mesh.rank, apart, size, count
                own.setdefault((kind, shard.name), []).append(found)
    copies: dict[tuple[str, str], dict[str, list[tuple[int, float, float, int]]]] = {}
    for each in trainer.mesh.gather(own):
        for what, parts in each.items():
            for region, *part in parts:
                copies.setdefault(what, {}).setdefault(region, []).append(tuple(part))
    return [_joined(trainer.step, *what, list(regions.values()), travel) for what, regions in copies.items()]


def _squares(trainer: Trainer, shard: Shard, ours: Tensor, theirs: Tensor, rows: range) -> tuple[float, float, int]:
    """Return the squares of the norms of the difference and of `theirs`, without what is rounding alone, and the number
    of elements."""
    size = len(shard.parameter)
    numbers = torch.arange(size).view(size, *[1] * (shard.local.dim() - 1))
    compared = comparable(trainer.settings.model, shard.name, numbers).flatten()
    a, b = ours.detach().double().cpu(), theirs.double()
    if len(compared) < size:
        chosen = torch.isin(torch.arange(rows.start, rows.stop), compared)
        a, b = a[chosen], b[chosen]
    return float((a - b).square().sum()), float(b.square().sum()), b.numel()


def _joined(
    step: int, kind: str, parameter: str, regions: list[list[tuple[int, float, float, int]]], travel: float
) -> Apart:
    """Return the difference of a whole tensor, of whose regions each has copies (rank, squared difference, squared
    norm, elements): of each the copy that is furthest away counts."""
    worst = [max(copies, key=lambda copy: (math.isnan(copy[1]), copy[1])) for copies in regions]
    rank, *_ = max(worst, key=lambda copy: (math.isnan(copy[1]), copy[1]))
    scale = math.sqrt(sum(size for _, _, size, _ in worst))
    if kind == WEIGHT:
        scale = max(scale, travel * math.sqrt(sum(count for *_, count in worst)))
    apart = math.sqrt(sum(square for _, square, _, _ in worst))
    difference = apart / scale if scale > 0 else (0.0 if apart == 0 else math.inf)
    same = all(copy[1] == copies[0][1] for copies in regions for copy in copies)
    return Apart(step, kind, parameter, difference, None if same else rank)
