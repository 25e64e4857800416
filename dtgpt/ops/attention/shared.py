"""Tokens that several samples share, such as a prompt with several answers: they come once, and attention copies them.

A row holds what its G samples share, and then what each has for itself: S tokens in all. Whatever works on single
tokens works on rows; attention works on samples `[B G, T]`, with the bits that it has for samples which share nothing.
In gradients of tokens that samples share, these are added in their order, rounded once.

Sharding rule: rows and heads may be sharded.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.operation import Operation


class SharedTokens(NamedTuple):
    """Where the tokens of samples, and those of rows, come from, and what their gradients are sums of: int64 tables as
    of `sum_rows`, of all rows, or of all samples, one after the other."""

    to_samples: Tensor  # [B G T, 1]
    from_samples: Tensor  # [B S, G]
    to_rows: Tensor  # [B S, 1]
    from_rows: Tensor  # [B G T, 1]
    group: int  # G

    def samples(self, x: Tensor) -> Tensor:
        """Return `[B G, T, ..]` of rows x `[B, S, ..]`."""
        return _Moved.apply(x, self.to_samples, self.from_samples, len(x) * self.group)

    def rows(self, x: Tensor) -> Tensor:
        """Return rows `[B, S, ..]` of samples x `[B G, T, ..]`, from the tokens that count."""
        return _Moved.apply(x, self.to_rows, self.from_rows, len(x) // self.group)

    def attend(self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return, for rows `[B, S, ..]`, what `attention` returns for samples."""
        return self.rows(attention(*(self.samples(each) for each in (q, k, v))))


def shared_tokens(copies: Tensor, size: int) -> SharedTokens:
    """Return the tables for rows of `size` tokens S. copies: int64 `[B, G, T]`, the place in its row of each token of a
    sample: what samples share is at the same place in all of them and in the row; what each has for itself, as many
    places for each, follows in the order of samples. Tokens behind are copies of a sample's last place."""
    (count, group, length), device = copies.shape, copies.device
    row, place = torch.arange(count, device=device)[:, None], torch.arange(size, device=device)
    each = (size - length) // (group - 1)  # places of a sample's own
    first = length - each
    held = copies[:, 0, :first] == place[:first]  # a row may share fewer
    behind = place[first:] - first
    own = behind // each * length + behind % each + held.sum(1, keepdim=True)
    origins = torch.cat([place[:first].expand(count, -1), own], dim=1)  # the token, of G T, that counts for a place
    flat = copies.flatten(1)
    counts = origins.gather(1, flat) == torch.arange(group * length, device=device)
    shared = place[:first, None] + length * torch.arange(group, device=device)
    alone = torch.full((size - first, group - 1), -1, device=device).expand(count, -1, -1)
    every = torch.where(held[..., None], shared, -1)
    back = torch.cat([every, torch.cat([origins[:, first:, None], alone], dim=2)], dim=1)
    begin = row * group * length
    return SharedTokens(
        to_samples=(flat + row * size).view(-1, 1),
        from_samples=torch.where(back < 0, -1, back + begin[..., None]).view(-1, group),
        to_rows=(origins + begin).view(-1, 1),
        from_rows=torch.where(counts, flat + row * size, -1).view(-1, 1),
        group=group,
    )


class _Moved(torch.autograd.Function):
    """Tokens by one table, and their gradients by another."""

    @staticmethod
    def forward(ctx, x: Tensor, forth: Tensor, back: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.count = len(x)
        return sum_rows(x.flatten(0, 1).flatten(1), forth).view(count, -1, *x.shape[2:])

    @staticmethod
    def backward(ctx, grad: Tensor):
        (back,) = ctx.saved_tensors
        moved = sum_rows(grad.flatten(0, 1).flatten(1), back)
        return moved.view(ctx.count, -1, *grad.shape[2:]), None, None, None


@torch.library.custom_op("dtgpt::sum_rows", mutates_args=())
def sum_rows(x: Tensor, table: Tensor) -> Tensor:
    """Return `[M, F]`: for each row of the table int64 `[M, K]` the sum of the rows of x `[N, F]` that it names, in its
    order; -1: none."""
    return SUM_ROWS(x, table)


def _sum_rows(x: Tensor, table: Tensor) -> Tensor:
    found = x.index_select(0, table.clamp(min=0).flatten()).view(*table.shape, -1) * (table >= 0)[..., None]
    return found.sum(1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


SUM_ROWS = Operation("sum_rows", _sum_rows, "y[i] = the sum over j of x[table[i, j]]")


@sum_rows.register_fake
def _(x: Tensor, table: Tensor) -> Tensor:
    return x.new_empty(len(table), x.shape[1])
