"""Context parallelism: each rank computes a slice of the tokens of every sample, and inside attention all tokens of
some heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

Two all-to-alls around the attention core exchange tokens for heads and back. The core itself runs as on one process, so
that document bounds, dropout masks and each head's bits are those of one process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.models.batch import Batch
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import AttentionCore, Dropout
from dtgpt.models.roles import Role, role_of
from dtgpt.parallel.coordinates import RankCoordinates
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.tensor import degrees_of_heads


def slice_of(batch: Batch, place: RankCoordinates) -> Batch:
    """Return the slice `[B, T / cp]` of the rank at `place` of whole samples. Document bounds stay those of all tokens,
    as the attention core wants them."""
    ranks = place.plan.cp
    if ranks == 1:
        return batch
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)

    def own(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole.chunk(ranks, dim=1)[place.cp].contiguous()

    return batch._replace(
        tokens=batch.tokens.chunk(ranks, dim=1)[place.cp].contiguous(),
        targets=own(batch.targets),
        positions=own(positions),
        loss_weights=own(batch.loss_weights),
    )


class HeadExchange:
    """The attention of a core over whole samples, for ranks that each have a slice of the tokens."""

    def __init__(self, core: AttentionCore, group: dist.ProcessGroup):
        self.core, self.group, self.ranks = core, group, group.size()
        self.attend: Callable[..., Tensor] = core.runner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        """Return `[B, T / cp, N, D]` from q of that shape and k, v `[B, T / cp, N_kv, D]`. With a cache, all tokens are
        here already."""
        if self.core.bound.cache is not None:
            return self.attend(q, k, v, *more)
        by_rank = [x.unflatten(2, (self.ranks, -1)) for x in (q, k, v)]
        heads = [x.shape[3] for x in by_rank]
        sent = torch.cat(by_rank, dim=3).permute(2, 0, 1, 3, 4)  # [cp, B, T / cp, heads, D], one message for all three
        whole = exchange(sent.contiguous(), self.group).transpose(0, 1).flatten(1, 2)
        out = self.attend(*whole.split(heads, dim=2), *more, first_head=self.group.rank() * heads[0])
        parts = out.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        return exchange(parts.contiguous(), self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `[ranks, ...]`, part r from rank r, where each rank gives `parts [ranks, ...]`, part r for rank r."""
    return _Exchange.apply(parts, group)


class _Exchange(torch.autograd.Function):
    """An all-to-all; backward, the gradients go back the same way."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor):
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None


def exchange_heads(part: Decoder, group: dist.ProcessGroup) -> None:
    """Let the attention cores of a stage compute whole samples for ranks that have slices."""
    for module in part.modules():
        if isinstance(module, AttentionCore):
            bind(module, run=HeadExchange(module, group))


def place_dropout(part: Decoder, settings: Settings, place: RankCoordinates) -> None:
    """Give each dropout site the global index of the first token, or of the first head, that it gets on this rank. It
    adds to what tensor parallelism has set."""
    config, plan = settings.model, settings.plan
    degrees = degrees_of_heads(config, plan)
    for name, module in part.named_modules():
        if not isinstance(module, Dropout):
            continue
        role, before = role_of(name, config.roles), module.bound.start or (0, 0, 0)
        if role is Role.STREAM_DROPOUT:
            bind(module, start=(before[0] + place.cp * settings.local_length, 0))
        elif role is Role.HEAD_DROPOUT:
            heads = config.num_heads // degrees[int(name.split(".")[1])] // plan.cp
            bind(module, start=(before[0] + place.cp * heads, 0, 0))
        else:
            raise ValueError(f"{name} has no role of a dropout site, which context parallelism needs")


@contextmanager
def whole_samples(stages: Sequence[Decoder]) -> Iterator[None]:
    """Let every rank compute all tokens of the samples that it is given while the context lasts."""
    modules = (module for stage in stages for module in stage.modules() if isinstance(module, AttentionCore))
    bound = [(core, core.bound.run) for core in modules if isinstance(core.bound.run, HeadExchange)]
    for core, run in bound:
        bind(core, run=run.attend)
    try:
        yield
    finally:
        for core, run in bound:
            bind(core, run=run)


def mean_over_slices(mesh: Mesh, values: Tensor) -> Tensor:
    """Return the mean over the ranks that share samples, in place: of losses of slices those of samples."""
    if mesh.cp_group is not None:
        dist.all_reduce(values, group=mesh.cp_group)
        values /= mesh.plan.cp
    return values
