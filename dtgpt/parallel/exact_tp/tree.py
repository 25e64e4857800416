"""Sums in a fixed tree: of the pieces of a dimension that tensor parallelism cuts, whoever has them.

The pieces are as many as a power of two, and each rank has as many neighbours, a power of two as well: what a rank adds
up is a node of the tree, and what the ranks add up is the rest of it. Each node is rounded to the type of the pieces,
since any of them may be what a rank sends. So the sum of all pieces has the same bits on one process and on many, and
ranks send no more than with other sums.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.ops.operation import Operation
from dtgpt.parallel.collectives import Collectives, GroupCollectives
from dtgpt.util.torch_private import all_gather_single


class Share(NamedTuple):
    """The pieces of a rank: so many, from the first on, of those of all ranks of the group. None: there is one rank."""

    number: int
    first: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, pieces: int, group: dist.ProcessGroup | None) -> "Share":
        """Return this rank's share of so many pieces, which the ranks of the group divide evenly."""
        if group is None:
            return cls(pieces)
        count = pieces // group.size()
        return cls(count, count * group.rank(), group)

    def gather(self, own: Tensor) -> Tensor:
        """Return what belongs to all pieces, `[pieces, ..]`, from what each rank has of its own, `[number, ..]`."""
        if self.group is None:
            return own
        whole = own.new_empty(self.group.size() * self.number, *own.shape[1:])
        all_gather_single(whole, own.contiguous(), self.group)
        return whole


def tree_sum(addends: Iterable[Tensor]) -> Tensor:
    """Return the sum of 2^n tensors of one shape: of neighbours, then of neighbouring sums. What is added may be
    overwritten; of addends that are made one by one, at most n + 1 exist at a time."""
    waiting: list[tuple[int, Tensor]] = []  # (level, node), whose neighbours are still to come
    for node in addends:
        level = 0
        while waiting and waiting[-1][0] == level:
            node = waiting.pop()[1].add_(node)
            level += 1
        waiting.append((level, node))
    ((_, root),) = waiting
    return root


def _tree_of_stack(x: Tensor, dtype: torch.dtype) -> Tensor:
    return tree_sum(x.unbind()).to(dtype)


# x `[2^n, ..]`, which may be overwritten, and a dtype: the sum `[..]` of its parts in a tree, then rounded.
TREE_OF_STACK = Operation("tree_of_stack", _tree_of_stack, "sum of neighbours, then of neighbouring sums")


def sum_over_ranks(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of what each rank has, in a tree over the ranks."""
    return tree_sum(Share(1, 0, group).gather(own[None]).unbind())


class TreeCollectives:
    """The collectives of a group whose sums are trees over the ranks: each gets the addends of its part, and adds them
    up. `faster`: what gathers where it can."""

    def __init__(self, group: dist.ProcessGroup, faster: Collectives | None):
        self.group, self.faster = group, faster

    def takes(self, whole: list[int], dim: int | None, itemsize: int) -> bool:
        """Return True: sums of any shape are trees."""
        return True

    def gather(self, part: Tensor, dim: int | None) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim`; None: each rank has the whole, which is returned."""
        shape = list(part.shape)
        if dim is not None:
            shape[dim] *= self.group.size()
        serves = self.faster is not None and self.faster.takes(shape, dim, part.itemsize)
        return (self.faster if serves and self.faster else GroupCollectives(self.group)).gather(part, dim)

    def sum(self, whole: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks; None: the whole sum."""
        ranks = self.group.size()
        if dim is not None:
            return self._scatter(torch.stack(whole.chunk(ranks, dim)))
        if whole.numel() % ranks:
            return sum_over_ranks(whole, self.group)
        own = self._scatter(whole.contiguous().view(ranks, -1))
        return Share(1, 0, self.group).gather(own[None]).view(whole.shape)

    def _scatter(self, parts: Tensor) -> Tensor:
        """Return the sum of this rank's part of what the ranks have, `[ranks, ..]` each."""
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self.group)
        return tree_sum(arrived.unbind())
