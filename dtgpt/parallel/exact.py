"""Gradients with the same bits under every plan: each micro-batch's is added as 64-bit integers, whose sums over
micro-batches, replicas and ranks have no order (`dtgpt.ops.optim.fixed_point`).

Every level of ZeRO is summed here; `fully_shard` finds no gradient to reduce. Of a tied table, autograd would add the
gradients of both uses in the type of the weights: the head's is diverted and added as an integer, too.
"""

from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtgpt.comm.pieces import Pieces
from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.exact_buckets import CutBucket, ExactBucket, RoundedBucket, SummedBucket
from dtgpt.parallel.gradients import parameter_groups
from dtgpt.parallel.mesh import Mesh


class ExactBuckets:
    """A bucket for each block of this rank's stages and one for the ends of each."""

    hooks = True

    def __init__(self, stages: list[Decoder], mesh: Mesh, settings: Settings):
        parts = [(stage, module, parameters) for stage in stages for module, parameters in _parts(stage)]
        tables = [_table(stage, parameters) for stage, _, parameters in parts]
        self.all = _make_buckets([parameters for *_, parameters in parts], tables, mesh, settings)
        for (stage, module, _), table, bucket in zip(parts, tables, self.all, strict=True):
            _watch(module, stage, bucket)
            if table is not None:
                bind(stage.get_submodule(stage.config.output_name.rpartition(".")[0]), diverted=bucket.divert)

    def expect(self, passes: int) -> None:
        """Set the backward passes of the following steps, at most those of the first."""
        for bucket in self.all:
            bucket.passes = passes

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients and their sums, bytes of padding) that the buckets hold."""
        used = sum(bucket.used() for bucket in self.all)
        return used, sum(t.nbytes for bucket in self.all for t in bucket.held()) - used

    def begin(self, done: int = 0) -> None:
        for bucket in self.all:
            bucket.begin(done)

    def finish(self) -> None:
        """Wait for the sums."""
        for bucket in self.all:
            bucket.wait()

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's part of the sum for each parameter, in its `units`, after `finish`."""
        return {p: t for bucket in self.all for p, t in zip(bucket.parameters, bucket.sums, strict=True)}

    def units(self) -> dict[nn.Parameter, Tensor]:
        """Return for the parameters whose sums are integers what one stands for, as `ExactBucket.unit`."""
        units = [(bucket.unit(), bucket) for bucket in self.all]
        return {p: unit for unit, bucket in units if unit is not None for p in bucket.parameters}


def _make_buckets(
    groups: list[list[nn.Parameter]], tables: list[nn.Parameter | None], mesh: Mesh, settings: Settings
) -> list[ExactBucket]:
    """Return a bucket for each group of parameters. tables: the tied table among those of a group, or None."""
    plan, pairs = mesh.plan, list(zip(groups, tables, strict=True))
    largest = max(sum(p.numel() for p in parameters) for parameters in groups) * settings.dtype.itemsize
    if settings.cuts_each_gradient:
        pieces = Pieces(mesh, mesh.devices.get_group("shard"), largest // plan.shard)
        return [CutBucket(parameters, mesh, settings, table, pieces) for parameters, table in pairs]
    if plan.zero or not settings.rounds_sums:
        return [SummedBucket(parameters, mesh, settings, table) for parameters, table in pairs]
    lengths = [RoundedBucket.lengths(parameters, table, plan.data_ranks) for parameters, table in pairs]
    pieces = Pieces(mesh, mesh.data_group, largest // plan.data_ranks, [n for each in lengths for n in each])
    first = accumulate(map(len, lengths), initial=0)
    return [
        RoundedBucket(parameters, mesh, settings, table, pieces, begin)
        for (parameters, table), begin in zip(pairs, first, strict=False)
    ]


def _parts(stage: Decoder) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return the blocks, and the stage itself for what lies around them, each with its parameters."""
    return list(zip((*stage.blocks.values(), stage), parameter_groups(stage), strict=False))


def _table(stage: Decoder, parameters: list[nn.Parameter]) -> nn.Parameter | None:
    """Return the parameter that embedding and head of the stage have in common, where it is among these."""
    if not stage.config.tied or stage.embedding is None or stage.head is None:
        return None
    table = stage.get_parameter(stage.config.table_name)
    return table if any(p is table for p in parameters) else None


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
