"""Gradients with the same bits under every plan: each micro-batch's is added as 64-bit integers, whose sums over
micro-batches, replicas and ranks have no order (`dtgpt.ops.optim.fixed_point`).

Every level of ZeRO is summed here; `fully_shard` finds no gradient to reduce. Of a tied table, autograd would add the
gradients of both uses in the type of the weights: the head's is diverted and added as an integer, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.shared.attention_backend import attention_backend
from dtgpt.ops.optim.fixed_point import AS_FLOATS, exact_sum, rounded, squares_of_rows
from dtgpt.parallel.exact_sums.buckets import (
    ApartBucket,
    CutBucket,
    ExactBucket,
    KeptBucket,
    RoundedBucket,
    SummedBucket,
)
from dtgpt.parallel.gradients import Buckets, parameter_groups
from dtgpt.parallel.mesh import Mesh, own_axes_of
from dtgpt.parallel.shared_memory.pieces import Pieces
from dtgpt.util.errors import UserError


class ExactSums(Buckets):
    """A bucket for each block of this rank's stages and one for the ends of each.

    rounds: whether sums are rounded as they are made: nothing else is added to those of a rank's only micro-batch
    where neither tp nor pp has addends on other ranks. keeps: whether the only process keeps the gradients of its two
    micro-batches until it rounds their sums: fewer bytes than integers.
    """

    orderless = True
    total = torch.int64
    costs = "dtgpt.planning.sums:ExactCosts"

    @staticmethod
    def check_plan(plan: ResolvedPlan) -> None:
        """Raise UserError where a plan cannot have these sums."""
        if plan.splits_backward:
            raise UserError(
                f"reduce=exact, but the schedule {plan.schedule} computes gradients of weights by other operations "
                "than other plans do, and sums them by itself; use another schedule or --reduce fast"
            )

    @staticmethod
    def check_settings(settings: Settings) -> None:
        """Raise UserError where a run cannot have these sums."""
        if settings.device.type == "cuda" and attention_backend(settings) == "sdpa":
            raise UserError(
                f"reduce=exact, but attention={settings.attention} is sdpa here, whose kernels on GPUs add up "
                "gradients in any order; use --attention flash or explicit, or --reduce fast"
            )

    def __init__(self, settings: Settings):
        super().__init__(settings)
        plan = settings.plan
        self.rounds = settings.micro_batches == 1 and plan.pp == 1 and plan.tp == 1
        self.keeps = settings.micro_batches == 2 and plan.world == 1

    def open(self, stages: list[Decoder], mesh: Mesh) -> None:
        parts = [(stage, *group) for stage in stages for group in parameter_groups(stage)]
        tables = [_table(stage, parameters) for stage, _, parameters in parts]
        apart = [bool(own_axes_of(parameters[0])) for *_, parameters in parts]
        pairs = [(parameters, table) for (*_, parameters), table in zip(parts, tables, strict=True)]
        made = iter(self._make_buckets([pair for pair, own in zip(pairs, apart, strict=True) if not own], mesh))
        self.all = [
            ApartBucket(parameters, mesh, self.settings) if own else next(made)
            for (parameters, _), own in zip(pairs, apart, strict=True)
        ]
        for (stage, module, _), table, bucket in zip(parts, tables, self.all, strict=True):
            _watch(module, stage, bucket)
            for user in module.modules() if isinstance(bucket, ApartBucket) else ():
                bind(user, use=partial(_divert_use, bucket.divert_use))
            if table is not None:
                bind(
                    stage.get_submodule(stage.config.output_name.rpartition(".")[0]),
                    through=partial(_divert, bucket.divert),
                )

    def _make_buckets(
        self, pairs: list[tuple[list[nn.Parameter], nn.Parameter | None]], mesh: Mesh
    ) -> list[ExactBucket]:
        """Return a bucket for each group of parameters, with the tied table among those of a group, or None."""
        settings, plan = self.settings, mesh.plan
        largest = max(sum(p.numel() for p in parameters) for parameters, _ in pairs) * settings.dtype.itemsize
        if self.cuts:
            pieces = Pieces(mesh, mesh.devices.get_group("shard"), largest // plan.shard)
            return [CutBucket(parameters, mesh, settings, table, pieces, self.rounds) for parameters, table in pairs]
        if self.keeps and not plan.zero:
            return [KeptBucket(parameters, mesh, settings, table) for parameters, table in pairs]
        if plan.zero or not self.rounds:
            return [SummedBucket(parameters, mesh, settings, table) for parameters, table in pairs]
        lengths = [RoundedBucket.lengths(parameters, table, plan.data_ranks) for parameters, table in pairs]
        pieces = Pieces(mesh, mesh.replicate_group, largest // plan.data_ranks, [n for each in lengths for n in each])
        first = accumulate(map(len, lengths), initial=0)
        return [
            RoundedBucket(parameters, mesh, settings, table, pieces, begin)
            for (parameters, table), begin in zip(pairs, first, strict=False)
        ]

    def gradients(self, parameters: Sequence[nn.Parameter], totals: list[Tensor]) -> list[Tensor]:
        """Return the totals in fp32, from integers and what one stands for."""
        made = dict[nn.Parameter, Tensor]()
        for bucket in self.all:
            if (unit := bucket.unit()) is not None:
                made |= zip(bucket.parameters, bucket.cut(AS_FLOATS(bucket.flat, unit)), strict=True)
        return [made.get(p, x) for p, x in zip(parameters, totals, strict=True)]

    def squares(self, gradients: list[Tensor], shares: Tensor, alone: list[Tensor]) -> Tensor:
        vectors = torch.cat([g for g in alone if g.dim() == 1] or [shares.new_zeros(0)])
        matrices = [squares_of_rows(g) for g in alone if g.dim() > 1]
        return exact_sum(torch.cat([*matrices, squares_of_rows(vectors)]))

    def root(self, squares: Tensor) -> Tensor:
        return rounded(squares).sqrt().float()


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


class _Diverted(torch.autograd.Function):
    """Return a weight, which has other uses, too, whose gradient goes to a function; the parameter gets what that
    returns."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, take: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.take = take
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.take(gradient), None


def _divert_use(take: Callable[[nn.Parameter, Tensor], Tensor | None], parameter: nn.Parameter) -> Tensor:
    return _Diverted.apply(parameter, partial(take, parameter))


def _divert(take: Callable[[Tensor], Tensor | None], weight: Tensor) -> Tensor:
    return _Diverted.apply(weight, take)
