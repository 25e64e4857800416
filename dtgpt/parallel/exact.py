"""Gradients with the same bits under every plan: each micro-batch's is added as 64-bit integers, whose sums over
micro-batches, replicas and ranks have no order (`dtgpt.ops.optim.fixed_point`).

Every level of ZeRO is summed here, and `fully_shard` finds no gradient to reduce. ZeRO-2 and 3 scatter each
micro-batch's, as ZeRO-1 does that of a single one; else a rank sums its micro-batches first. Of a tied table, autograd
would add the two gradients in the type of the weights: the head's is diverted and added as an integer, too.
"""

import math
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
from dtgpt.parallel.gradients import local_gradient, local_part, parameter_groups
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import region_of_tp
from dtgpt.util.torch_private import reduce_scatter_single


class Sender:
    """Reduce-scatters over the ranks of ZeRO, one at a time: memory of the last one is free when the next begins."""

    def __init__(self, group: dist.ProcessGroup):
        self.ranks, self._group = group.size(), group
        self._finish: Callable[[], None] | None = None

    def begin(self, whole: Tensor, total: Tensor, first: bool) -> None:
        """Add to `total [n]` this rank's part of the sum over the ranks of `whole [ranks, n]`. first: what the total
        holds does not count."""
        self.wait()
        part = torch.empty_like(total)
        work = reduce_scatter_single(part, whole.flatten(), self._group, async_op=True)

        def finish() -> None:
            work.wait()
            whole.numel()  # keeps its memory until then
            total.copy_(part) if first else total.add_(part)

        self._finish = finish

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = None


class ExactBucket:
    """The gradients of some parameters as integers, with a count of misfits as the last one. For ranks of ZeRO they are
    laid out in equal parts, one for each rank, with the count at the end of each."""

    def __init__(
        self, parameters: list[nn.Parameter], shapes: list[tuple[int, ...]], mesh: Mesh, settings: Settings,
        memory: Tensor | None, sender: Sender | None,
    ):  # fmt: skip
        """shapes: of the parameters before ZeRO cuts them. memory: of the gradients of one micro-batch, where each
        micro-batch's are sent; None: of their sum, for new memory. sender: None without ZeRO."""
        self.parameters, self.passes, self._sender = parameters, settings.micro_batches, sender
        self._group, self._work = mesh.dp_group, None
        self._at_once = memory is not None
        ranks, parts = mesh.plan.shard, part_sizes(shapes, mesh.plan.shard)
        length = ranks * sum(parts) + 1
        local = torch.zeros(length, dtype=torch.int64, device=mesh.device) if memory is None else memory[:length]
        padded = local[:-1].split([ranks * size for size in parts])
        wholes = [piece[: math.prod(shape)].view(shape) for piece, shape in zip(padded, shapes, strict=True)]
        self._pieces, self._count = [piece.view(ranks, -1) for piece in padded], local[-1]
        self.fraction = fraction_bits(settings.dtype)
        addends = settings.micro_batches * mesh.plan.dp * mesh.plan.tp
        self._make_sum = partial(FixedPointSum, misfits=self._count, fraction=self.fraction, addends=addends)
        self._sum, self._wholes = self._make_sum(wholes), wholes
        self.flat = local if sender is None else local.new_zeros(sum(parts) + 1)
        kept = [(len(chunk(range(rows), ranks, mesh.place.shard)), *rest) for rows, *rest in shapes]
        own = self.flat[:-1].split(parts)
        self.sums = [piece[: math.prod(shape)].view(shape) for piece, shape in zip(own, kept, strict=True)]
        self._computing: list[nn.Parameter] = []  # what the modules compute with
        self._diverted: Tensor | None = None
        self._table: tuple[int, FixedPointSum] | None = None  # its index among the parameters
        self.done = self._arrived = 0

    def watch(self, computing: list[nn.Parameter]) -> None:
        """Take the gradients of these, which are the parameters or what ZeRO gathers of each."""
        self._computing = computing
        for parameter in computing:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def divert(self, table: nn.Parameter) -> Callable[[Tensor], None]:
        """Return what is to be called with the head's gradient of a tied table, one of the parameters."""
        index = next(i for i, p in enumerate(self.parameters) if p is table)
        self._table = index, self._make_sum([self._wholes[index]])
        return partial(setattr, self, "_diverted")

    def begin(self, done: int = 0) -> None:
        """Take note that `done` backward passes of the step are over."""
        self.done, self._arrived = done, 0

    def _arrive(self, parameter: nn.Parameter) -> None:
        self._arrived += 1
        if self._arrived == len(self._computing):
            self._arrived = 0
            self.take()

    def take(self) -> None:
        """Add what a backward pass left; after the last pass, or after each, begin the sum over the replicas."""
        first = self._at_once or self.done == 0
        if first:
            self._count.zero_()
        self._sum.add([local_gradient(p) for p in self._computing], first)
        if self._table is not None and self._diverted is not None:
            index, total = self._table
            total.add([local_part(self._diverted, self._computing[index])])
            self._diverted = None
        for parameter in self._computing:
            parameter.grad = None
        self.done += 1
        last = self.done == self.passes
        if self._sender is not None and (last or self._at_once):
            counts = self._count.expand(self._sender.ranks, 1)
            whole = torch.cat([*self._pieces, counts], dim=1)
            self._sender.begin(whole, self.flat, first=not self._at_once or self.done == 1)
        elif last and self._group is not None:
            self._work = dist.all_reduce(self.flat, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._sender is not None:
            self._sender.wait()
        if self._work is not None:
            self._work.wait()

    def unit(self) -> Tensor:
        """Return what an integer stands for, fp32 scalar: NaN where a gradient did not fit."""
        return torch.where(self.flat[-1] > 0, math.nan, 2.0**-self.fraction).float()

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients, bytes of padding) that the bucket holds, without memory of one micro-batch."""
        used = 0 if self._at_once else sum(whole.nbytes for whole in self._wholes)
        whole = 0 if self._at_once else 8 * (sum(piece.numel() for piece in self._pieces) + 1)
        if self._sender is not None:
            used, whole = used + sum(t.nbytes for t in self.sums), whole + self.flat.nbytes
        return used, whole - used


def part_sizes(shapes: list[tuple[int, ...]], ranks: int) -> list[int]:
    """Return the elements of each rank's part of tensors of these shapes, cut by rows into equal parts."""
    return [-(-rows // ranks) * math.prod(rest) for rows, *rest in shapes]


class ExactBuckets:
    """A bucket for each block of this rank's stages and one for the ends of each."""

    hooks = True

    def __init__(self, stages: list[Decoder], mesh: Mesh, settings: Settings):
        groups = [(stage, parameters) for stage in stages for parameters in parameter_groups(stage)]
        shapes = [[tuple(map(len, region_of_tp(p, mesh.place))) for p in parameters] for _, parameters in groups]
        memory, sender = None, None
        if mesh.plan.shard > 1:
            sender = Sender(mesh.devices.get_group("shard"))
            if settings.cuts_each_gradient:
                longest = max(mesh.plan.shard * sum(part_sizes(each, mesh.plan.shard)) for each in shapes) + 1
                memory = torch.empty(longest, dtype=torch.int64, device=mesh.device)
        self.all = [
            ExactBucket(parameters, each, mesh, settings, memory, sender)
            for (_, parameters), each in zip(groups, shapes, strict=True)
        ]
        for (stage, _), bucket in zip(groups, self.all, strict=True):
            _watch(stage, bucket)

    def expect(self, passes: int) -> None:
        """Set the backward passes of the following steps, at most those of the first."""
        for bucket in self.all:
            bucket.passes = passes

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients, bytes of padding) that the buckets hold."""
        used, padding = zip(*(bucket.bytes() for bucket in self.all), strict=True)
        return sum(used), sum(padding)

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


def _watch(stage: Decoder, bucket: ExactBucket) -> None:
    """Let a bucket take the gradients of its parameters. `fully_shard` makes what modules compute with in their first
    forward pass."""
    config, names = stage.config, {p: name for name, p in stage.named_parameters()}
    if config.tied and stage.embedding is not None and stage.head is not None:
        table = stage.get_parameter(config.table_name)
        if any(p is table for p in bucket.parameters):
            bind(stage.get_submodule(config.output_name.rpartition(".")[0]), diverted=bucket.divert(table))
    if not isinstance(stage, FSDPModule):
        bucket.watch(bucket.parameters)
        return
    own = [names[p] for p in bucket.parameters]
    module = next((b for i, b in stage.blocks.items() if own[0].startswith(f"blocks.{i}.")), stage)

    def watch(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        bucket.watch([stage.get_parameter(name) for name in own])

    handle = module.register_forward_pre_hook(watch)
