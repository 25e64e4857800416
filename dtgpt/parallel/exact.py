"""Gradients with the same bits under every plan: each micro-batch's is added as 64-bit integers, whose sums over
micro-batches, replicas and ranks have no order (`dtgpt.ops.optim.fixed_point`).

Every level of ZeRO is summed here; `fully_shard` finds no gradient to reduce. Of a tied table, autograd would add the
gradients of both uses in the type of the weights: the head's is diverted and added as an integer, too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.ops.optim.fixed_point import FixedPointSum, fraction_bits
from dtgpt.parallel.coordinates import chunk
from dtgpt.parallel.gradients import call_on_gradients, local_gradient, local_part, parameter_groups
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import region_of_tp
from dtgpt.util.torch_private import reduce_scatter_single


class ExactBucket(ABC):
    """The gradients of some parameters: this rank's part of their sums, as the integers of `flat`, whose last element
    counts gradients that do not fit. ZeRO cuts each parameter by rows into parts of equal size."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings):
        self.parameters, self.passes, self.ranks = parameters, settings.micro_batches, mesh.plan.shard
        self.shapes = [tuple(map(len, region_of_tp(p, mesh.place))) for p in parameters]  # before ZeRO
        self.parts = [-(-rows // self.ranks) * math.prod(rest) for rows, *rest in self.shapes]  # elements of each rank
        self.flat = torch.zeros(sum(self.parts) + 1, dtype=torch.int64, device=mesh.device)
        self.own = self.flat[:-1].split(self.parts)
        kept = [(len(chunk(range(rows), self.ranks, mesh.place.shard)), *rest) for rows, *rest in self.shapes]
        self.sums = [piece[: math.prod(shape)].view(shape) for piece, shape in zip(self.own, kept, strict=True)]
        self.done = 0
        self._fraction = fraction_bits(settings.dtype)
        self._addends = settings.micro_batches * mesh.plan.ranks_of_stage
        self._computing: list[nn.Parameter] = []  # what the modules compute with
        self._arrived = 0
        self._table = 0  # the index of a tied table
        self._diverted: Tensor | None = None  # the head's gradient of it
        self._second: FixedPointSum | None = None  # of what is diverted

    def watch(self, computing: list[nn.Parameter]) -> None:
        """Take the gradients of these, which are the parameters or what ZeRO gathers of each."""
        self._computing = computing
        call_on_gradients(computing, self._arrive)

    def divert(self, table: nn.Parameter) -> Callable[[Tensor], None]:
        """Return what is to be called with the head's gradient of a tied table, one of the parameters."""
        self._table = next(i for i, p in enumerate(self.parameters) if p is table)
        self._second = self.sum_of_table()
        return partial(setattr, self, "_diverted")

    def begin(self, done: int = 0) -> None:
        """Take note that `done` backward passes of the step are over."""
        self.done, self._arrived = done, 0

    def _arrive(self, parameter: nn.Parameter) -> None:
        self._arrived += 1
        if self._arrived < len(self._computing):
            return
        gradients, second = [local_gradient(p) for p in self._computing], None
        if self._diverted is not None:
            second = local_part(self._diverted, self._computing[self._table])
        for parameter in self._computing:
            parameter.grad = None
        self._arrived, self._diverted, self.done = 0, None, self.done + 1
        with torch.no_grad():
            self.take(gradients, second)

    @abstractmethod
    def sum_of_table(self) -> FixedPointSum:
        """Return what adds to the integers of the tied table alone."""

    @abstractmethod
    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        """Add the gradients of the pass that is now `done`, and a second one of the tied table. Gradients are whole but
        for tensor parallelism."""

    @abstractmethod
    def wait(self) -> None:
        """Hold the current stream until the sums are complete."""

    def unit(self) -> Tensor:
        """Return what an integer stands for, fp32 scalar: NaN where a gradient did not fit."""
        return torch.where(self.flat[-1] > 0, math.nan, 2.0**-self._fraction).float()

    def held(self) -> list[Tensor]:
        """Return all integers that the bucket holds."""
        return [self.flat]

    def _make_sum(self, totals: list[Tensor], misfits: Tensor) -> FixedPointSum:
        return FixedPointSum(totals, misfits, self._fraction, self._addends)


class SummedBucket(ExactBucket):
    """Gradients that are summed over the micro-batches of a rank before they are sent."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings):
        super().__init__(parameters, mesh, settings)
        self._group = mesh.devices.get_group("shard") if self.ranks > 1 else mesh.data_group
        self._local = self.flat
        if self.ranks > 1:
            self._local = self.flat.new_zeros(self.ranks * sum(self.parts) + 1)
        pieces = self._local[:-1].split([self.ranks * part for part in self.parts])
        self._wholes = [p[: math.prod(shape)].view(shape) for p, shape in zip(pieces, self.shapes, strict=True)]
        self._pieces = [piece.view(self.ranks, -1) for piece in pieces]
        self._sum = self._make_sum(self._wholes, self._local[-1])
        self._work: dist.Work | None = None

    def sum_of_table(self) -> FixedPointSum:
        return self._make_sum([self._wholes[self._table]], self._local[-1])

    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        if self.done == 1:
            self._local[-1].zero_()
        self._sum.add(gradients, first=self.done == 1)
        if second is not None and self._second is not None:
            self._second.add([second])
        if self.done < self.passes or self._group is None:
            return
        if self.ranks == 1:
            self._work = dist.all_reduce(self.flat, group=self._group, async_op=True)
        else:
            counts = self._local[-1].expand(self.ranks, 1)
            whole = torch.cat([*self._pieces, counts], dim=1).flatten()
            self._work = reduce_scatter_single(self.flat, whole, self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def held(self) -> list[Tensor]:
        return [self.flat] if self.ranks == 1 else [self.flat, self._local]


class Exchange:
    """What the ranks of ZeRO send to each other for one bucket at a time: the memory of the last one is free when the
    next begins."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._finish: Callable[[], None] | None = None

    def begin(self, sent: Tensor, take: Callable[[Tensor], None]) -> None:
        """Send the rows of `sent [ranks, n]` to the ranks, and let `take` have the rows that come from them."""
        self.wait()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            sent.numel()  # keeps its memory until then
            take(received)

        self._finish = finish

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = None


class CutBucket(ExactBucket):
    """Gradients that ZeRO cuts after each pass: they travel in the type in which backward made them, and the rank that
    keeps a part adds up those of all ranks."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings, exchange: Exchange):
        super().__init__(parameters, mesh, settings)
        self._exchange = exchange
        self._sum = self._make_sum([self.flat[:-1]], self.flat[-1])

    def sum_of_table(self) -> FixedPointSum:
        return self._make_sum([self.own[self._table]], self.flat[-1])

    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        pieces = [self._by_rank(g, part) for g, part in zip(gradients, self.parts, strict=True)]
        if second is not None:
            pieces.append(self._by_rank(second, self.parts[self._table]))
        self._exchange.begin(torch.cat(pieces, dim=1), partial(self._add, self.done == 1))

    def _by_rank(self, gradient: Tensor, part: int) -> Tensor:
        """Return the parts of a gradient for the ranks, `[ranks, part]`."""
        flat = gradient.flatten()
        return nn.functional.pad(flat, (0, self.ranks * part - len(flat))).view(self.ranks, part)

    @torch.no_grad()
    def _add(self, first: bool, received: Tensor) -> None:
        if first:
            self.flat[-1].zero_()
        size = len(self.flat) - 1
        for rank, row in enumerate(received):
            self._sum.add([row[:size]], first=first and rank == 0)
            if self._second is not None:
                self._second.add([row[size:]])

    def wait(self) -> None:
        self._exchange.wait()


class ExactBuckets:
    """A bucket for each block of this rank's stages and one for the ends of each."""

    hooks = True

    def __init__(self, stages: list[Decoder], mesh: Mesh, settings: Settings):
        make: Callable[[list[nn.Parameter]], ExactBucket] = partial(SummedBucket, mesh=mesh, settings=settings)
        if settings.cuts_each_gradient:
            exchange = Exchange(mesh.devices.get_group("shard"))
            make = partial(CutBucket, mesh=mesh, settings=settings, exchange=exchange)
        self.all: list[ExactBucket] = []
        for stage in stages:
            made = [make(parameters) for parameters in parameter_groups(stage)]
            for module, bucket in zip((*stage.blocks.values(), stage), made, strict=False):
                _watch(module, stage, bucket)
            if stage.config.tied and stage.embedding is not None and stage.head is not None:
                take = made[-1].divert(stage.get_parameter(stage.config.table_name))
                bind(stage.get_submodule(stage.config.output_name.rpartition(".")[0]), diverted=take)
            self.all += made

    def expect(self, passes: int) -> None:
        """Set the backward passes of the following steps, at most those of the first."""
        for bucket in self.all:
            bucket.passes = passes

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of integers, bytes of padding) that the buckets hold."""
        used = sum(t.nbytes for bucket in self.all for t in bucket.sums)
        for bucket in self.all:
            if len(bucket.held()) > 1:
                used += 8 * sum(map(math.prod, bucket.shapes))
        return used, sum(t.nbytes for bucket in self.all for t in bucket.held()) - used

    def begin(self, done: int = 0) -> None:
        for bucket in self.all:
            bucket.begin(done)

    def finish(self) -> None:
        """Wait for the sums."""
        for bucket in self.all:
            bucket.wait()

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's part of the gradient of each parameter, int64, after `finish`."""
        return {p: t for bucket in self.all for p, t in zip(bucket.parameters, bucket.sums, strict=True)}

    def units(self) -> dict[nn.Parameter, Tensor]:
        """Return for each parameter what an integer of its gradient stands for, as `ExactBucket.unit`."""
        units = [(bucket.unit(), bucket) for bucket in self.all]
        return {p: unit for unit, bucket in units for p in bucket.parameters}


def _watch(module: nn.Module, stage: Decoder, bucket: ExactBucket) -> None:
    """Let a bucket take the gradients of its parameters, of a module of the stage or around the blocks. `fully_shard`
    makes what modules compute with in their first forward pass."""
    if not isinstance(module, FSDPModule):
        bucket.watch(bucket.parameters)
        return
    names = {p: name for name, p in stage.named_parameters()}
    own = [names[p] for p in bucket.parameters]

    def watch(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        bucket.watch([stage.get_parameter(name) for name in own])

    handle = module.register_forward_pre_hook(watch)
