"""What the ranks of tests of the cross-entropy do: functions importable by name, for `tests.ranks`."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtgpt.ops.cross_entropy import cross_entropy
from dtgpt.parallel.mesh import chunk


class Case(NamedTuple):
    """Logits `[B, T, V]` of `vocab_size` columns and padding, and targets `[B, T]`."""

    logits: Tensor
    targets: Tensor
    vocab_size: int


class Result(NamedTuple):
    """The loss, and the gradient of 3 x loss in this rank's columns."""

    loss: Tensor
    gradient: Tensor
    columns: range


def losses(cases: list[Case], fused: bool = False) -> list[Result]:
    """Of each case, with the columns cut over the ranks as a plan cuts them."""
    return [loss_of(case, fused) for case in cases]


def loss_of(case: Case, fused: bool) -> Result:
    columns, group = range(case.logits.shape[-1]), None
    if dist.is_initialized():
        columns, group = chunk(columns, dist.get_world_size(), dist.get_rank()), dist.group.WORLD
    mine = case.logits[..., columns.start : columns.stop].clone().requires_grad_()
    loss = cross_entropy(mine, case.targets, case.vocab_size, columns.start, group, fused)
    (3 * loss).backward()
    return Result(loss.detach(), mine.grad, columns)
