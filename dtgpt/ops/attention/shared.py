"""Tokens that several samples share, such as a prompt with several answers: they come once, and attention copies them.

A row holds what its G samples share, P tokens, and then what each has for itself: S tokens in all. Whatever works on
single tokens works on rows; attention works on samples `[B G, T]`, with the bits that it has for samples which share
nothing. In gradients of tokens that samples share, these are added in their order, rounded once.

Sharding rule: rows and heads may be sharded.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SharedTokens(NamedTuple):
    """Where the tokens of samples are in their row."""

    copies: Tensor  # int64 [B, G, T]: the place in its row of each token of a sample
    origins: Tensor  # int64 [B, S]: the token of the row's samples, of G T, that counts for each place

    def samples(self, x: Tensor) -> Tensor:
        """Return `[B G, T, ..]` of rows x `[B, S, ..]`."""
        return _Samples.apply(x, *self)

    def rows(self, x: Tensor) -> Tensor:
        """Return rows `[B, S, ..]` of samples x `[B G, T, ..]`, from the tokens that count."""
        return _Rows.apply(x, *self)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Return `[B, .., ..]` of x `[B, n, ..]` at places `[B, ..]`."""
    first = len(x[0]) * torch.arange(len(x), device=x.device)
    found = x.flatten(0, 1).index_select(0, (places.flatten(1) + first[:, None]).flatten())
    return found.view(*places.shape, *x.shape[2:])


class _Samples(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, copies: Tensor, origins: Tensor) -> Tensor:
        ctx.save_for_backward(copies, origins)
        return _take(x, copies).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        copies, origins = ctx.saved_tensors
        group, length = copies.shape[1:]
        grad = grad.unflatten(0, (-1, group))
        made = _take(grad.flatten(1, 2), origins)
        shared = length - (origins.shape[1] - length) // (group - 1)  # places before the samples' own
        if shared:
            every = copies[:, 0, :shared] == torch.arange(
                shared, device=copies.device
            )  # where a prompt is shorter: not
            total = grad[:, :, :shared].sum(1, dtype=torch.float32) * every.view(*every.shape, *[1] * (grad.dim() - 3))
            made[:, :shared] = total.to(made.dtype)
        return made, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, copies: Tensor, origins: Tensor) -> Tensor:
        ctx.save_for_backward(copies, origins)
        return _take(x.unflatten(0, (len(copies), -1)).flatten(1, 2), origins)

    @staticmethod
    def backward(ctx, grad: Tensor):
        copies, origins = ctx.saved_tensors
        counts = origins.gather(1, copies.flatten(1)) == torch.arange(copies[0].numel(), device=copies.device)
        made = _take(grad, copies) * counts.view(*copies.shape, *[1] * (grad.dim() - 2))
        return made.flatten(0, 1), None, None
