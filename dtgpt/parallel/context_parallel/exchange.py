"""What context parallel ranks send each other around an attention core, each having a slice of the tokens of every
sample.

As many ranks as divide the heads of keys and values exchange tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023).
Where there are more ranks (`ranks_of_queries`), those with the same heads have all their keys and values, and each
some of their queries (Dubey et al. 2024, section 3.3.2). A query near the end of a sample attends to more keys, so each
has a chunk of queries of the first half of the sample and the one opposite to it of the second: as much to compute as
the others. Only queries travel for that, with the message that exchanges heads; outside of attention a slice is one
piece.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.models.layers import AttentionCore
from dtgpt.parallel.shared_memory.all_to_all import TokenExchange
from dtgpt.util.shared.torch_private import group_of_name

shared: dict[str, TokenExchange] = {}  # by the name of a group whose ranks share memory


class HeadExchange:
    """The attention of a core over whole samples, for ranks that each have a slice of the tokens."""

    def __init__(self, core: AttentionCore, group: dist.ProcessGroup):
        self.core, self.group, self.ranks, self.place = core, group.group_name, group.size(), group.rank()
        self.once = [1] * self.ranks
        self.attend: Callable[..., Tensor] = core.runner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        """Return `[B, T / cp, N, D]` from q of that shape and k, v `[B, T / cp, N_kv, D]`. With a cache, all tokens are
        here already."""
        return self.attend(q, k, v, *more) if self.core.bound.cache is not None else self.exchanged(q, k, v, *more)

    def exchanged(self, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        """Return what a call does, from the tokens of all ranks."""
        if self.group in shared:
            whole = tokens_to_heads([q, k, v], self.group)
            out = self.attend(*whole, *more, first_head=self.place * whole[0].shape[2])
            return heads_to_tokens([out], self.group)[0]
        by_rank = [x.unflatten(2, (self.ranks, -1)).permute(2, 1, 0, 3, 4) for x in (q, k, v)]
        heads = [x.shape[3] for x in by_rank]
        sent = torch.cat(by_rank, dim=3)  # [cp, T / cp, B, heads, D], one message for all three, which are copied once
        joined = exchange(sent, self.once, self.once, self.group).flatten(0, 1).transpose(0, 1)
        out = self.attend(*joined.split(heads, dim=2), *more, first_head=self.place * heads[0])
        parts = out.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        back = exchange(parts, self.once, self.once, self.group)
        return back.permute(1, 2, 0, 3, 4).flatten(2, 3)


class QueryExchange(HeadExchange):
    """The same for more ranks than there are heads of keys and values. Rank `a heads + b` of the group has the keys and
    values of all tokens of heads b, and the queries of the chunks `chunks_of(a)`."""

    def __init__(self, core: AttentionCore, group: dist.ProcessGroup, heads: int):
        """heads: ranks that have different heads."""
        super().__init__(core, group)
        self.heads, self.parts = heads, self.ranks // heads
        place, ranks = self.place, range(self.ranks)
        halves = [[part_of_half(2 * rank + half, heads, self.parts) for half in (0, 1)] for rank in ranks]
        # The pieces of this rank's queries, (half, heads) counted as one number, in the order of who gets them.
        self.order = [
            half * heads + rank % heads for rank in ranks for half in (0, 1) if halves[place][half] == rank // heads
        ]
        self.sent = [sum(part == rank // heads for part in halves[place]) for rank in ranks]
        self.received = [sum(part == place // heads for part in halves[rank]) for rank in ranks]
        self.chunks = chunks_of(place // heads, self.parts)

    def exchanged(self, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        keys, values = self._whole(k, v)
        site, bounds, *rest = more
        found, own = [], self.place % self.heads
        for index, queries in zip(self.chunks, self._queries(q).chunk(2, dim=1), strict=True):
            end = (index + 1) * queries.shape[1]  # a query attends to columns up to its own
            seen = None if bounds is None else bounds[:, :end].clamp(max=end)
            whole = keys[:, :end], values[:, :end]
            found.append(self.attend(queries, *whole, site, seen, *rest, first_head=own * queries.shape[2]))
        return self._back(torch.cat(found, dim=1))

    def _whole(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the keys and the values of all tokens and some heads, `[B, T, N_kv / heads, D]`. Backward adds the
        gradients of the ranks that have the same ones as torch.sum does: in the order of the ranks, in fp32, from
        addends in the type of the activations."""
        by_heads = torch.stack((k, v)).unflatten(3, (self.heads, -1)).permute(3, 0, 1, 2, 4, 5)
        sent = by_heads.expand(self.parts, *by_heads.shape).flatten(0, 1)
        slices = exchange(sent, self.once, self.once, self.group)  # [cp, 2, B, T / cp, N_kv / heads, D]
        return slices.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind()

    def _queries(self, q: Tensor) -> Tensor:
        """Return the queries of this rank's chunks `[B, T / parts, N / heads, D]`, by their positions."""
        pieces = q.unflatten(1, (2, -1)).unflatten(3, (self.heads, -1)).permute(1, 3, 0, 2, 4, 5).flatten(0, 1).unbind()
        sent = torch.stack([pieces[index] for index in self.order])  # [2 heads, B, T / (2 cp), N / heads, D]
        return exchange(sent, self.sent, self.received, self.group).transpose(0, 1).flatten(1, 2)

    def _back(self, out: Tensor) -> Tensor:
        """Return the outputs of this rank's tokens `[B, T / cp, N, D]` from those of its chunks."""
        pieces = out.unflatten(1, (2 * self.heads, -1)).transpose(0, 1)
        received = exchange(pieces, self.received, self.sent, self.group).unbind()
        own = torch.stack([received[self.order.index(index)] for index in range(2 * self.heads)])
        own = own.unflatten(0, (2, self.heads)).permute(2, 0, 3, 1, 4, 5)  # [B, half, T / (2 cp), heads, N / heads, D]
        return own.flatten(3, 4).flatten(1, 2)


def chunks_of(part: int, parts: int) -> tuple[int, int]:
    """Return the two of `2 parts` chunks of a sample whose queries a rank has, so that all have as many pairs of query
    and key."""
    return part, 2 * parts - 1 - part


def part_of_half(half: int, heads: int, parts: int) -> int:
    """Return which part of the queries the half of a slice belongs to. half: its number among those of all slices, by
    position, of which a chunk has `heads`."""
    chunk = half // heads
    return min(chunk, 2 * parts - 1 - chunk)


@torch.library.custom_op("dtgpt::exchange", mutates_args=())
def exchange(pieces: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Return `[sum(received), ...]`, pieces from the ranks of the group in their order, where each gives `pieces
    [sum(sent), ...]` in the order of who gets them: an all-to-all. sent, received: how many go to and come from each
    rank. group: its name. Backward, the gradients go back the same way."""
    arrived = pieces.new_empty(sum(received), *pieces.shape[1:])
    dist.all_to_all_single(arrived, pieces.contiguous(), received, sent, group=group_of_name(group))
    return arrived


@exchange.register_fake
def _(pieces, sent, received, group):
    return pieces.new_empty(sum(received), *pieces.shape[1:])


def _save(ctx, inputs, output) -> None:
    _, *ctx.route = inputs


def _differentiate(ctx, grad: Tensor):
    sent, received, group = ctx.route
    return exchange(grad, received, sent, group), None, None, None


exchange.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("dtgpt::tokens_to_heads", mutates_args=())
def tokens_to_heads(tensors: list[Tensor], group: str) -> list[Tensor]:
    """Return `[B, T, N / cp, D]` of each `[B, T / cp, N, D]` by the memory that the ranks of the group share. Backward,
    gradients go back the same way."""
    return shared[group].to_heads(tensors)


@tokens_to_heads.register_fake
def _(tensors, group):
    ranks = group_of_name(group).size()
    return [x.new_empty(x.shape[0], ranks * x.shape[1], x.shape[2] // ranks, x.shape[3]) for x in tensors]


@torch.library.custom_op("dtgpt::heads_to_tokens", mutates_args=())
def heads_to_tokens(tensors: list[Tensor], group: str) -> list[Tensor]:
    """Return `[B, T / cp, N, D]` of each `[B, T, N / cp, D]`: the inverse."""
    return shared[group].to_tokens(tensors)


@heads_to_tokens.register_fake
def _(tensors, group):
    ranks = group_of_name(group).size()
    return [x.new_empty(x.shape[0], x.shape[1] // ranks, ranks * x.shape[2], x.shape[3]) for x in tensors]


def _save_group(ctx, inputs, output) -> None:
    ctx.group = inputs[1]


tokens_to_heads.register_autograd(
    lambda ctx, grads: (heads_to_tokens(grads, ctx.group), None), setup_context=_save_group
)
heads_to_tokens.register_autograd(
    lambda ctx, grads: (tokens_to_heads(grads, ctx.group), None), setup_context=_save_group
)
