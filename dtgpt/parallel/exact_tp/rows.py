"""Gradients of the parameters that all rows share, norms and the biases of branches, in pieces of the positions.

Under sequence parallelism a rank has the rows of some positions. The sum over the rows of each piece is made alike by
whoever has it, in fp32; all ranks get those of all pieces, and add them up in a tree. The gradients are then whole on
each rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.norms import NORM_AND_PASS, RESIDUAL, RESIDUAL_NORM
from dtgpt.parallel.exact_tp.products import column_sum, operand, shifted_columns
from dtgpt.parallel.exact_tp.tree import Share, tree_sum

Terms = Callable[[Tensor], list[Tensor]]


class PiecewiseRows:
    """What computes norms and residual sums with such gradients: a `dtgpt.ops.norms.RowSums`."""

    def __init__(self, positions: Share, columns: int):
        """positions: pieces of the positions of this rank's activations between the matrices. columns: its pieces of
        the columns of a matrix that is cut by its outputs."""
        self.positions, self.columns = positions, columns

    def residual(self, x: Tensor, branch: Tensor, bias: Tensor | None, *site: Any) -> Tensor:
        """Return what `RESIDUAL` does."""
        return RESIDUAL(x, *self._shifted(branch, bias), *site)

    def norm_and_pass(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return what `NORM_AND_PASS` does."""
        passed, normed = NORM_AND_PASS(x, weight.detach(), None if bias is None else bias.detach(), eps)
        return passed, _Scaled.apply(normed, passed, weight, bias, eps, self.positions)

    def residual_norm(
        self, x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what `RESIDUAL_NORM` does. rest: its eps and dropout site."""
        fixed = weight.detach(), None if bias is None else bias.detach()
        total, normed = RESIDUAL_NORM(x, *self._shifted(branch, branch_bias), *fixed, *rest)
        return total, _Scaled.apply(normed, total, weight, bias, rest[0], self.positions)

    def inner_bias(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x `[.., N]`, bias `[N]`) for the function that adds them, where a matrix is cut by its outputs."""
        return shifted_columns(self.columns, x, bias), bias.detach()

    def _shifted(self, branch: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (branch, None) if bias is None else (_Shifted.apply(branch, bias, self.positions), bias.detach())


def _pieces(share: Share, *each: Tensor) -> Iterator[list[Tensor]]:
    """Yield the rows `[B T / P, H]` of each of this rank's pieces of the tensors `[B, T, H]`."""
    for parts in zip(*(x.chunk(share.count, 1) for x in each), strict=True):
        yield [operand(part).flatten(0, -2) for part in parts]


def _whole(share: Share, sums: list[Tensor]) -> Tensor:
    """Return the sum over the pieces of all ranks, from those of this rank's pieces."""
    return tree_sum(share.gather(torch.stack(sums)).unbind())


class _Shifted(torch.autograd.Function):
    """Return a branch `[B, T, H]` as it is, and give the bias `[H]` that is added to it elsewhere its gradient."""

    @staticmethod
    def forward(ctx: Any, branch: Tensor, bias: Tensor, share: Share) -> Tensor:
        ctx.share, ctx.dtype = share, bias.dtype
        return branch.view_as(branch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not ctx.needs_input_grad[1]:
            return grads[0], None, None
        sums = [column_sum(dy) for (dy,) in _pieces(ctx.share, grads[0])]
        return grads[0], _whole(ctx.share, sums).to(ctx.dtype), None


class _Scaled(torch.autograd.Function):
    """Return a norm `[B, T, H]` of x as it is, and give its weight and bias `[H]` their gradients."""

    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, share: Share
    ) -> Tensor:
        ctx.save_for_backward(x.detach())
        ctx.share, ctx.eps, ctx.dtype, ctx.shifts = share, eps, weight.dtype, bias is not None
        return normed.view_as(normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), dy = ctx.saved_tensors, grads[0]
        if not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
            return dy, None, None, None, None, None
        sums = []
        for dy_rows, x_rows in _pieces(ctx.share, dy, x):
            terms = dy_rows.to(torch.promote_types(dy.dtype, torch.float32))
            scaled = column_sum(terms * _normed(x_rows.to(terms.dtype), ctx.eps, ctx.shifts))
            sums.append(torch.stack([scaled, column_sum(terms)]) if ctx.shifts else scaled[None])
        made = _whole(ctx.share, sums).to(ctx.dtype)
        return dy, None, made[0], made[1] if ctx.shifts else None, None, None


def _normed(x: Tensor, eps: float, centred: bool) -> Tensor:
    """Return the rows of x `[R, H]`, normalised: by LayerNorm, or by RMSNorm where they are not centred."""
    if not centred:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)
