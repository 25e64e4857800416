"""Which part of every parameter this rank holds, in global indices.

Whatever a plan did to the model, what is left on a rank is a rectangle of each global tensor. Initial weights, the
optimizer, the gradient norm and checkpoints work on these rectangles, and need to know nothing else of the plan.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.binding import bound_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder, fill_weight, unique_parameters
from dtgpt.parallel.gradients import Sums
from dtgpt.parallel.layout import ZERO, ParameterLayout, Region, axes_of, chunk
from dtgpt.parallel.mesh import Mesh, own_axes_of
from dtgpt.util.torch_private import is_dtensor

SMALL = 1 << 16  # elements of a region below which one rank writes all of it


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that this rank holds."""

    index: int  # among the shards of this rank
    name: str  # of the whole parameter: the same under every plan
    parameter: nn.Parameter  # what the module holds
    local: Tensor  # this rank's fp32 memory of it, a plain tensor: what the optimizer works on
    low_precision: Tensor | None  # what the module computes with, or ZeRO gathers, in a narrower type than fp32
    region: Region  # global indices of `local`
    replicas: int  # ranks that hold this region, each counted in the norm by 1 / replicas
    partial: bool  # gradients of it are addends on the tp ranks
    is_tied_copy: bool  # the last stage's copy of the tied embedding: updated like the original, never counted
    replica: int  # which of these replicas this rank holds

    @property
    def dimensions(self) -> int:
        """The number of dimensions by which optimizers tell matrices from vectors: biases of experts are vectors."""
        return 1 if self.name.endswith(".bias") else self.local.dim()

    @property
    def own(self) -> tuple[Region, slice]:
        """(global indices, rows of `local`) of what this rank alone writes to a checkpoint: the ranks that hold the
        same region share its rows, unless it is small."""
        replicas = 1 if self.is_tied_copy or self.local.numel() < SMALL else self.replicas
        rows = chunk(range(len(self.region[0])), replicas, self.replica)
        if self.is_tied_copy or self.replica >= replicas:
            rows = range(0)
        first = self.region[0][rows.start : rows.stop]
        return (first, *self.region[1:]), slice(rows.start, rows.stop)

    def place_of(self, state: Tensor) -> tuple[tuple[int, ...], Region]:
        """Return (shape of the whole, global indices here) of a tensor of the optimizer's state: the parameter's, or
        those of a value for each row of a matrix, or of all of a stack, `[rows]` on one rank and `[0]` on the others.
        """
        shape = tuple(self.parameter.shape)
        if state.dim() == len(shape):
            return shape, self.region
        return (math.prod(shape[:-1]),), (range(len(state)),)


class Shards:
    """All that this rank holds of the model, as shards, and their gradients."""

    sums: Sums  # of shards that are trained

    def __init__(
        self,
        stages: list[Decoder],
        mesh: Mesh,
        masters: bool = True,
        gathered: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
        sums: Sums | None = None,
        dtype: torch.dtype = torch.float32,
        trained: bool = True,
    ):
        """masters: False leaves fp32 masters out, where nothing is trained: `local` is then what the module holds.
        gathered: what ZeRO gathers of parameters instead of `local`. sums: what sums gradients, where something is
        trained. dtype: the type of the activations. trained: False for the parameters that are frozen, in place of the
        others."""
        self.mesh, self.dtype = mesh, dtype
        if sums is not None:
            self.sums = sums
        self.frozen: Shards | None = None  # of a run with adapters: the weights of the model
        self.all: list[Shard] = []
        for stage in stages:
            partial = _sums_over_tp(stage)
            for name, parameter in unique_parameters(stage).items():
                if parameter.requires_grad != trained:
                    continue
                layout = layout_of(parameter, mesh.plan)
                held = (parameter.to_local() if is_dtensor(parameter) else parameter).detach()
                region = _checked_region(name, layout, mesh.place.rank, held)
                # Where modules compute with a narrow type, the optimizer works on fp32 masters beside it; `fully_shard`
                # keeps masters in the modules, and what it gathers from may be narrower.
                narrow = held if masters and held.dtype != torch.float32 else None
                shard = Shard(
                    index=len(self.all),
                    name=name,
                    parameter=parameter,
                    local=held if narrow is None else torch.empty_like(held, dtype=torch.float32),
                    low_precision=gathered.get(parameter) if narrow is None else narrow,
                    region=region,
                    replicas=layout.replicas,
                    partial=name in partial,
                    is_tied_copy=stage.embedding is None and stage.config.tied and name == stage.config.table_name,
                    replica=layout.replica(mesh.place.rank),
                )
                self.all.append(shard)
        self.parameters = [shard.parameter for shard in self.all]
        self.gradients: list[Tensor] = []  # of each shard, after `take_gradients`
        self._counted = [s.index for s in self.all if not s.is_tied_copy]
        # The ranks that hold a region may share the work of its norm: each then counts other tensors.
        self._counted_alone = [i for i in self._counted if i % self.all[i].replicas == self.all[i].replica]
        self._shares = torch.tensor([1 / self.all[i].replicas for i in self._counted], device=mesh.device)
        self.config = config = stages[0].config
        self._tables = [s.index for s in self.all if config.tied and s.name == config.table_name]
        self._partial = [s.index for s in self.all if s.partial]

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.all)

    @torch.no_grad()
    def initialize(self, config: ModelConfig, key: Tensor) -> None:
        """Draw this rank's part of the initial weights, straight into its memory. Integers are what a capability makes
        of weights."""
        for shard in self.all:
            if shard.local.is_floating_point():
                fill_weight(shard.local, shard.name, shard.region, config, key)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Give the modules what `local` holds."""
        for shard in self.all:
            if shard.low_precision is not None:
                shard.low_precision.copy_(shard.local)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Collect the gradients that the passes left: summed over all replicas, over tp where the ranks hold addends,
        and over the stages that hold the tied table."""
        # Over replicas first, since these sums have been under way since backward.
        self.gradients = self.sums.totals(self.parameters)
        if self.mesh.tp_group is not None and self._partial:
            parts = [self.gradients[i] for i in self._partial]
            whole = torch.cat([part.flatten().to(self.sums.total) for part in parts])  # small ones, in one message
            dist.all_reduce(whole, group=self.mesh.tp_group)
            for part, piece in zip(parts, whole.split([p.numel() for p in parts]), strict=True):
                part.copy_(piece.view_as(part))
        if self.mesh.tied_group is not None:
            for i in self._tables:
                dist.all_reduce(self.gradients[i], group=self.mesh.tied_group)
        elif len(self._tables) == 2:  # first and last stage are both here
            first, second = (self.gradients[i] for i in self._tables)
            first += second
            second.copy_(first)
        self.gradients = self.sums.gradients(self.parameters, self.gradients)

    def drop_gradients(self) -> None:
        self.gradients = []
        for shard in self.all:
            shard.parameter.grad = None

    def gradient(self, shard: Shard) -> Tensor:
        return self.gradients[shard.index]

    def norm(self) -> Tensor:
        """Return the global norm of the gradient, fp32 on the device and equal on all ranks: what several ranks hold
        counts once, and so does the tied table."""
        return self.sums.root(self.mesh.all_reduce(self.squares()))

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients of what counts in the norm: of all but the last stage's copy of a tied table."""
        return [self.gradients[i] for i in self._counted]

    def squares(self) -> Tensor:
        """Return this rank's part of the squared norm."""
        alone = [self.gradients[i] for i in self._counted_alone]
        return self.sums.squares(self.counted_gradients(), self._shares, alone)


def _checked_region(name: str, layout: ParameterLayout, rank: int, held: Tensor) -> Region:
    """Return the global indices of what a rank holds. Raise ValueError where it has another shape."""
    region = layout.region(rank)
    if tuple(held.shape) != tuple(map(len, region)):
        raise ValueError(f"{name}: this rank holds {tuple(held.shape)}, but its region is {tuple(map(len, region))}")
    return region


def _sums_over_tp(stage: Decoder) -> set[str]:
    """Return the names of the parameters whose gradients tensor parallelism leaves as addends on the ranks."""
    modules = stage.named_modules()
    return {f"{name}.{p}" for name, module in modules for p in bound_of(module).sums_over_tp}


def layout_of(parameter: nn.Parameter, plan: ResolvedPlan) -> ParameterLayout:
    """Return the layout of a parameter of the finished model, as its placements say."""
    cuts = dict(ZERO)
    if is_dtensor(parameter):
        for axis, cut in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if axis != "shard" and cut.is_shard():
                cuts[axis] = cast(Any, cut).dim
    return ParameterLayout(tuple(parameter.shape), axes_of(plan, own_axes_of(parameter)), cuts)
