"""Whole matrices for optimizers that need them: each lies on one rank, its owner, for a moment of the update.

The ranks of one pipeline stage divide the matrices by cost. In rounds, the parts of a matrix go to its owner, and what
the owner makes of it goes to every rank that holds a part or a replica. The messages of a round travel while the owners
compute another one.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.models.inventory import Shape
from dtgpt.models.roles import MATRICES, STACKS, Role
from dtgpt.parallel.layout import Region, slices
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard, Shards, layout_of

ROUND = 1 << 25  # elements that an owner takes in a round, but for a larger matrix

Tensors = Mapping[int, Tensor]  # by the index of the shard
Pending = Callable[[], dict[int, Tensor]]  # waits for the messages, and returns what they brought


def is_orthogonalized(shape: Shape, role: Role | None) -> bool:
    """Return whether a parameter is a matrix of a block, or a stack of these. shape: of the whole; role: of its
    module."""
    return len(shape) - (role in STACKS) > 1 and role in (*MATRICES, *STACKS)


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each matrix: the dearest first, each to the rank that has least to do so far."""
    loads, owners = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners


def rounds_of(costs: Sequence[int], sizes: Sequence[int], owners: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of the matrices of each round: of every owner the next ones, the dearest first, up to ROUND
    elements. sizes: elements of each matrix."""
    waiting: dict[int, list[int]] = {}
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        waiting.setdefault(owners[index], []).append(index)
    while any(waiting.values()):
        taken = []
        for owned in waiting.values():
            size = 0
            while owned and (not size or size + sizes[owned[0]] <= ROUND):
                size += sizes[owned[0]]
                taken.append(owned.pop(0))
        yield sorted(taken)


def stage_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same pipeline stages, ordered by dp, cp, tp; None where that is this rank alone.
    All ranks call this at the same point."""
    size = mesh.plan.ranks_of_stage
    if size == 1:
        return None
    if mesh.plan.pp == 1:
        return dist.group.WORLD
    return mesh.subgroup([list(range(first, first + size)) for first in range(0, mesh.world, size)])


class Matrices:
    """The exchange of the `chosen` shards, weights `[rows, columns]` of which each rank of a stage holds a part.

    rounds: the indices of the shards of each round; `owned` returns those whose matrices this rank updates. Every rank
    of the stage makes the same calls in the same order.
    """

    def __init__(self, shards: Shards, chosen: Sequence[Shard], costs: Sequence[int], dtype: torch.dtype):
        """costs: of each matrix, in any unit, the same on all ranks. dtype: in which matrices travel."""
        mesh, plan = shards.mesh, shards.mesh.plan
        self._ranks = range(plan.ranks_of_stage)  # of the stage, as layouts count them
        self._here = mesh.rank % len(self._ranks)
        self._group = stage_group(mesh)
        self._dtype, self._device = dtype, mesh.device
        self._regions: dict[tuple[int, int], Region] = {}  # by shard and rank
        self._shards = {shard.index: shard for shard in chosen}
        self._layouts = {shard.index: layout_of(shard.parameter, plan) for shard in chosen}
        self._parts_travel = any(layout.replicas < len(self._ranks) for layout in self._layouts.values())
        owners = owners_of(costs, len(self._ranks))
        self._owner = {shard.index: owner for shard, owner in zip(chosen, owners, strict=True)}
        sizes = [shard.parameter.numel() for shard in chosen]
        self.rounds = [[chosen[i].index for i in taken] for taken in rounds_of(costs, sizes, owners)]

    def owned(self, indices: Sequence[int]) -> list[int]:
        """Return those of the shards whose whole matrix lies on this rank."""
        return [index for index in indices if self._owner[index] == self._here]

    def gather(self, parts: Tensors) -> Pending:
        """Send this rank's parts, each of its shard's shape, to the owners. The result waits for those that this rank
        owns and returns them whole, `[rows, columns]`."""
        if not self._parts_travel:
            return lambda: {index: parts[index] for index in self.owned(list(parts))}
        pieces = [
            [parts[i].reshape(-1) for i in parts if self._owner[i] == rank and self._sends(i, self._here)]
            for rank in self._ranks
        ]
        owned = self.owned(list(parts))
        expected = [[(i, self._region(i, rank)) for i in owned if self._sends(i, rank)] for rank in self._ranks]
        arrived = self._exchange(pieces, expected)

        def whole() -> dict[int, Tensor]:
            found = {i: self._empty(tuple(self._shards[i].parameter.shape)) for i in owned}
            for index, region, piece in arrived():
                found[index][slices(region)] = piece
            return found

        return whole

    def scatter(self, wholes: Tensors, indices: Sequence[int]) -> Pending:
        """Send the matrices that this rank owns, of the round `indices`, to the ranks that hold parts. The result waits
        for this rank's parts of the round and returns them."""
        if self._group is None:
            return lambda: dict(wholes)
        pieces = [
            [wholes[i][slices(self._region(i, rank))].reshape(-1) for i in self.owned(indices)] for rank in self._ranks
        ]
        expected = [[(i, self._shards[i].region) for i in indices if self._owner[i] == rank] for rank in self._ranks]
        arrived = self._exchange(pieces, expected)
        return lambda: {index: piece for index, _, piece in arrived()}

    def _exchange(
        self, pieces: list[list[Tensor]], expected: list[list[tuple[int, Region]]]
    ) -> Callable[[], Iterator[tuple[int, Region, Tensor]]]:
        """Begin an all-to-all. pieces: flat, to each rank. expected: (shard, region) from each. The result waits and
        yields what arrived."""
        sizes = [[math.prod(map(len, region)) for _, region in regions] for regions in expected]
        sending = torch.cat([self._empty((0,)), *(piece for each in pieces for piece in each)])
        receiving = self._empty((sum(map(sum, sizes)),))
        work = dist.all_to_all_single(
            receiving,
            sending,
            output_split_sizes=[sum(each) for each in sizes],
            input_split_sizes=[sum(piece.numel() for piece in each) for each in pieces],
            group=self._group,
            async_op=True,
        )

        def arrived() -> Iterator[tuple[int, Region, Tensor]]:
            work.wait()
            found = [(index, region) for regions in expected for index, region in regions]
            flat = receiving.split([size for each in sizes for size in each])
            for (index, region), piece in zip(found, flat, strict=True):
                yield index, region, piece.view([len(r) for r in region])
            sending.numel()  # keeps its memory until the messages have left

        return arrived

    def _sends(self, index: int, rank: int) -> bool:
        """Return whether a rank sends its part to the owner: one rank of all that hold the part, near the owner."""
        layout = self._layouts[index]
        return layout.replica(rank) == layout.replica(self._owner[index])

    def _region(self, index: int, rank: int) -> Region:
        if (index, rank) not in self._regions:
            self._regions[index, rank] = self._layouts[index].region(rank)
        return self._regions[index, rank]

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
