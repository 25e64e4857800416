"""Gradients of the parameters that all rows share, norms and the biases of branches, in pieces of the positions.

Under sequence parallelism a rank has the rows of some positions. The sum over the rows of each piece is made alike by
whoever has it, in fp32; all ranks get those of all pieces, and add them up in a tree. The gradients are then whole on
each rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.activations import local_bias
from dtgpt.ops.norms import NORM_AND_PASS, RESIDUAL, RESIDUAL_NORM, RowSums
from dtgpt.ops.operation import Operation
from dtgpt.ops.rotary_positions import ROTARY_QKV, angles_of, rotate, split_heads, table_of
from dtgpt.parallel.exact_tp.products import COLUMN_SUMS, aligned, column_sum, operand
from dtgpt.parallel.exact_tp.tree import TREE_OF_STACK, Share


class PiecewiseRows(RowSums):
    """What computes norms and residual sums with such gradients."""

    def __init__(self, positions: Share, share: Callable[[int], Share], ranks: int):
        """positions: pieces of the positions of this rank's activations between the matrices. share: of this rank, of
        the pieces of so many columns, or heads, that tensor parallelism cuts between so many ranks."""
        self.positions, self.share, self.ranks = positions, share, ranks

    def residual(self, x: Tensor, branch: Tensor, bias: Tensor | None, *site: Any) -> Tensor:
        """Return what `RESIDUAL` does."""
        return NORM_IN_PIECES(x, branch, bias, None, None, 0.0, *site, self.positions)[0]

    def norm_and_pass(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return what `NORM_AND_PASS` does."""
        return NORM_IN_PIECES(x, None, None, weight, bias, eps, None, 0.0, (0, 0), self.positions)

    def residual_norm(
        self, x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what `RESIDUAL_NORM` does. rest: its eps and dropout site."""
        return NORM_IN_PIECES(x, branch, branch_bias, weight, bias, *rest, self.positions)

    def activated(self, activation: Callable[..., Tensor], width: int, x: Tensor, *bias: Tensor) -> Tensor:
        """Return activation(x, *bias)."""
        count = self.share(width).number
        if bias:
            return ACTIVATED(x, local_bias(x, *bias), activation, count)
        return _in_columns(activation, count, x)

    def rotary_qkv(
        self,
        qkv: Tensor,
        places: Tensor | None,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        rotation: Sequence[float],
        num_positions: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `ROTARY_QKV` does. The gradients of the weights are sums over pieces of the heads."""
        q, k, v = ROTARY_QKV(qkv, places, q_weight.detach(), k_weight.detach(), eps, rotation, num_positions)
        angles = angles_of(table_of(qkv.shape[-1], rotation, num_positions, qkv.device), places, qkv.shape[1])
        given, plain = [], split_heads(qkv.detach())
        for made, x, weight in zip((q, k), plain[:2], (q_weight, k_weight), strict=True):
            given.append(_ScaledHeads.apply(made, x, weight, angles, eps, self.share(made.shape[2] * self.ranks)))
        return given[0], given[1], v


def _norm(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, key: Tensor | None, p: float, start: Sequence[int], share: Share,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    shift = None if branch_bias is None else branch_bias.detach()
    if branch is not None and branch_bias is not None:
        branch = _Shifted.apply(branch, branch_bias, partial(_sum_rows, share, branch_bias.dtype))
    if weight is None:
        return RESIDUAL(x, branch, shift, key, p, start), None
    fixed = weight.detach(), None if bias is None else bias.detach()
    if branch is None:
        total, normed = NORM_AND_PASS(x, *fixed, eps)
    else:
        total, normed = RESIDUAL_NORM(x, branch, shift, *fixed, eps, key, p, start)
    return total, _Scaled.apply(normed, total, weight, bias, eps, share)


# x, branch or None, its bias, the weight of a norm or None, its bias, eps, key, p, start, share: what `RESIDUAL`,
# `NORM_AND_PASS` or `RESIDUAL_NORM` returns, the sum and its norm, with gradients of the vectors summed in pieces.
NORM_IN_PIECES = Operation("norm_in_pieces", _norm, "x + dropout(branch + bias), and its norm")


def _activated(x: Tensor, bias: Tensor, activation: Callable[..., Tensor], count: int) -> Tensor:
    x = _Shifted.apply(x, bias, partial(_sum_columns, count))
    return _in_columns(activation, count, x, bias.detach())


def _in_columns(activation: Callable[..., Tensor], count: int, *given: Tensor) -> Tensor:
    """Return activation(*given). On a CPU in pieces of the columns: there PyTorch computes the last elements of a
    tensor by other instructions than the rest."""
    if not given[0].is_cpu:
        return activation(*given)
    parts = zip(*(map(aligned, each.chunk(count, -1)) for each in given), strict=True)
    return torch.cat([aligned(activation(*part)) for part in parts], dim=-1)


# x `[.., N]`, bias, an activation of their sum, count: its result; the gradient of the bias is made in pieces of N.
ACTIVATED = Operation("activated_in_pieces", _activated, "f(x + bias)")


def _piece_sums(dy: Tensor, x: Tensor | None, count: int, eps: float, centred: bool) -> Tensor:
    others = [None] * count if x is None else _rows(x, count)
    return torch.stack([_sums_of(*pair, eps, centred) for pair in zip(_rows(dy, count), others, strict=True)])


def _rows(x: Tensor, count: int) -> list[Tensor]:
    """Return the rows `[B T / P, H]` of each piece of x `[B, T, H]`."""
    return [operand(part).flatten(0, -2) for part in x.chunk(count, 1)]


def length_of_piece(x: Tensor, count: int) -> int:
    """Return the positions of each of `count` pieces of x `[B, T, H]`."""
    return x.shape[1] // count


def _sums_of(dy: Tensor, x: Tensor | None, eps: float, centred: bool) -> Tensor:
    terms = dy.to(torch.promote_types(dy.dtype, torch.float32))
    if x is None:
        return column_sum(terms)[None]
    return torch.stack([column_sum(terms * _normed(x.to(terms.dtype), eps, centred)), column_sum(terms)])


# dy `[B, T, H]`, x of its shape or None, count, eps, centred: of each of `count` pieces of T, the sums over its rows of
# dy times x, normalised by LayerNorm or, where it is not centred, by RMSNorm, and of dy: fp32 `[count, 2, H]`; without
# x the latter alone, `[count, 1, H]`.
PIECE_SUMS = Operation("row_sums_of_pieces", _piece_sums, "sum(dy norm(x)), sum(dy), of rows in pieces")


def _whole(share: Share, dtype: torch.dtype, *given: Any) -> Tensor:
    """Return the sum over the pieces of all ranks of what `PIECE_SUMS` returns, `[kinds, H]`."""
    dy, x, *rest = given
    return TREE_OF_STACK(share.gather(PIECE_SUMS(dy, x, share.number, *rest)), dtype)


def _sum_rows(share: Share, dtype: torch.dtype, dy: Tensor) -> Tensor:
    """Return the sum `[H]` over all positions of dy `[B, T, H]`, of which a rank has some."""
    return _whole(share, dtype, dy, None, 0.0, False)[0]


def _sum_columns(count: int, dy: Tensor) -> Tensor:
    """Return the sum `[N]` over all rows of dy `[.., N]`, in `count` pieces of columns."""
    return COLUMN_SUMS(dy.flatten(0, -2), count)


class _Shifted(torch.autograd.Function):
    """Return x `[.., N]` as it is. A bias `[N]` that is added to it elsewhere gets its gradient here: what `sums` makes
    of that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.sums, ctx.dtype = sums, bias.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wants_bias = ctx.needs_input_grad[1]
        return grads[0], ctx.sums(grads[0]).to(ctx.dtype) if wants_bias else None, None


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
        made = _whole(ctx.share, ctx.dtype, dy, x, ctx.eps, ctx.shifts)
        return dy, None, made[0], made[1] if ctx.shifts else None, None, None


class _ScaledHeads(torch.autograd.Function):
    """Return heads `[B, T, N, D]`, of x normalised, scaled and rotated, as they are, and give the weight `[D]` its
    gradient. angles: their cosines and sines. The heads get a contiguous gradient: the order in which PyTorch sums the
    columns of another one depends on how many heads there are."""

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, x: Tensor, weight: Tensor, angles: tuple[Tensor, Tensor], eps: float, share: Share
    ) -> Tensor:
        ctx.save_for_backward(x, *angles)
        ctx.share, ctx.eps, ctx.dtype = share, eps, weight.dtype
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, cosine, sine), given, dweight = ctx.saved_tensors, operand(grads[0]), None
        if ctx.needs_input_grad[2]:
            dy = rotate(given.to(cosine.dtype), cosine, -sine)
            dweight = _whole(ctx.share, ctx.dtype, dy.flatten(0, 1), x.flatten(0, 1), ctx.eps, False)[0]
        return given, None, dweight, None, None, None


def _normed(x: Tensor, eps: float, centred: bool) -> Tensor:
    """Return the rows of x `[R, H]`, normalised: by LayerNorm, or by RMSNorm where they are not centred."""
    if not centred:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)
