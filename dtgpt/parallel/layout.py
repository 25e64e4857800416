"""Which part of each parameter a rank holds: for each axis of the mesh the dimension that it cuts.

The styles of tensor parallelism cut a model, and `fully_shard` cuts what they leave of it. What both do stands here,
from shapes, roles and the plan alone, for all that works with parts: initial weights, optimizers, checkpoints, and
planning, which has no ranks. A parameter may have axes of its own: experts lie on some of the ranks that otherwise hold
the same weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape
from dtgpt.util import seams

Region = tuple[range, ...]  # global indices of a part of a tensor
OUTPUTS, INPUTS = -2, -1  # dimensions of a matrix, or a stack of matrices, `[out, in]`
ZERO: Mapping[str, int] = {"shard": 0}  # ZeRO cuts the first dimension of every parameter


def axes_of(plan: ResolvedPlan, own: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """Return {axis: ranks} of the grid of a stage's ranks, the outermost axis first. own: axes of a parameter among the
    ranks of data, which lie next to tp: ZeRO and replicas have the rest of these ranks."""
    rest = plan.data_ranks // math.prod(own.values())
    replicate, shard = (1, rest) if plan.zero else (rest, 1)
    return {"replicate": replicate, "shard": shard, **own, "tp": plan.tp}


@dataclass(frozen=True)
class ParameterLayout:
    """How the ranks of a pipeline stage share a parameter, where they are those of `axes`."""

    shape: Shape  # of the whole
    axes: dict[str, int]  # axis -> ranks, the outermost axis first
    cuts: Mapping[str, int]  # axis -> the dimension that it cuts; ranks along any other axis hold the same
    sums_over: tuple[str, ...] = ()  # axes whose ranks have addends of the gradient
    style: Any = field(default=None, compare=False)  # a `ParallelStyle`, or None

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank along each axis."""
        found = {}
        for axis, ranks in reversed(self.axes.items()):
            rank, found[axis] = divmod(rank, ranks)
        return found

    def region(self, rank: int, without: str | None = None) -> Region:
        """Return the global indices of a rank's part. The innermost axis cuts first, the next one what that leaves.
        without: an axis that is taken to cut nothing; without "shard" it is the part that the rank computes with."""
        region, place = [range(size) for size in self.shape], self.coordinates(rank)
        for axis, index in place.items():
            if axis in self.cuts and axis != without:
                dim = self.cuts[axis]
                region[dim] = chunk(region[dim], self.axes[axis], index)
        return tuple(region)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold each part."""
        return math.prod(ranks for axis, ranks in self.axes.items() if axis not in self.cuts)

    def replica(self, rank: int) -> int:
        """Return which of these `replicas` a rank holds."""
        place, found = self.coordinates(rank), 0
        for axis, ranks in self.axes.items():
            if axis not in self.cuts:
                found = found * ranks + place[axis]
        return found


def chunk(whole: range, pieces: int, index: int) -> range:
    """Return piece `index` of a range, cut by the rule of `torch.chunk`: pieces of equal size, the last ones shorter or
    empty."""
    size = math.ceil(len(whole) / pieces)
    return whole[index * size : (index + 1) * size]


def slices(part: Region) -> tuple[slice, ...]:
    """Return the ranges as an index of a tensor."""
    return tuple(slice(r.start, r.stop) for r in part)


def degrees_of_heads(config: ModelConfig, plan: Plan) -> list[int]:
    """Return for each block the number of tp ranks that its heads are cut over: 1 where each rank holds all of them."""
    for find in seams.listed("head_degrees") if plan.tp > 1 and plan.table else ():
        return find(config, plan)
    return [plan.tp] * config.num_layers
