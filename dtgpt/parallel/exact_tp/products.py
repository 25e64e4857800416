"""Linear maps in pieces of the dimension that tensor parallelism cuts.

A library chooses the order of a product's sums by shapes, strides and alignment. So each piece is a product of its own,
of contiguous operands that have the same shape under every plan. Of a matrix that is cut by its outputs, pieces are
ranges of columns of the result; of the gradient of the input, addends. Of one cut by its inputs it is the reverse.
Addends are rounded to the type of the activations, and added in a tree (`tree`).

Sharding rule: a rank has some of the pieces; what it returns of addends is a node of the tree, which
`tree.TreeCollectives` adds to those of other ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.linear import linear
from dtgpt.ops.operation import Operation
from dtgpt.parallel.exact_tp.tree import tree_sum

ALIGNED = 64  # bytes at which operands begin: libraries take other ways for some alignments


def operand(x: Tensor) -> Tensor:
    """Return x, contiguous and aligned, so that a product sums it in the same order wherever x is from."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNED == 0 else x.clone(memory_format=torch.contiguous_format)


def aligned(x: Tensor) -> Tensor:
    """Return x as an `operand`. Its gradient is one, too, for the backward pass of what returned x."""
    return _Aligned.apply(x)


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = operand(x)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return operand(grads[0])


def pieces_of(x: Tensor, count: int, dim: int) -> Iterator[Tensor]:
    """Yield the pieces of x along a dimension, one after the other."""
    return map(operand, x.chunk(count, dim))


def _addends(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    pairs = zip(pieces_of(x, count, 1), pieces_of(weight, count, int(by_inputs)), strict=True)
    return tree_sum(linear(part, w, None) if by_inputs else part @ w for part, w in pairs)


def _columns(x: Tensor, weight: Tensor, bias: Tensor | None, count: int, by_inputs: bool) -> Tensor:
    if by_inputs:
        return torch.cat([x @ w for w in pieces_of(weight, count, 1)], dim=1)
    biases = [None] * count if bias is None else list(pieces_of(bias, count, 0))
    pairs = zip(pieces_of(weight, count, 0), biases, strict=True)
    return torch.cat([linear(x, w, b) for w, b in pairs], dim=1)


def _weight_gradient(dy: Tensor, x: Tensor, count: int, by_inputs: bool) -> Tensor:
    if by_inputs:
        return torch.cat([operand(dy).t() @ part for part in pieces_of(x, count, 1)], dim=1)
    return torch.cat([part.t() @ operand(x) for part in pieces_of(dy, count, 1)])


def _column_sums(x: Tensor, count: int) -> Tensor:
    return torch.cat([column_sum(part) for part in pieces_of(x, count, 1)])


def column_sum(x: Tensor) -> Tensor:
    """Return the sum of each column of x `[R, C]`, in fp32 at least."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


# x `[M, K]`, weight, count, by_inputs: x w^T of a weight `[N, K]` by its inputs, or x w of a weight `[K, N]`, as a node
# of `count` pieces of K.
ADDENDS = Operation("addends_of_pieces", _addends, "x w, pieces of K added in a tree")
# x `[M, K]`, weight, bias, count, by_inputs: x w of a weight `[K, N]` by its inputs, or x w^T + bias of a weight
# `[N, K]`, in `count` pieces of N.
COLUMNS = Operation("columns_of_pieces", _columns, "x w + bias, in pieces of columns")
# dy `[M, N]`, x `[M, K]`, count, by_inputs: dy^T x `[N, K]`, in `count` pieces of K by the inputs of the weight, or N.
WEIGHT_GRADIENT = Operation("weight_gradient_of_pieces", _weight_gradient, "dy^T x, in pieces of rows or columns")
# x `[R, C]`, count: the sums `[C]` of columns, fp32.
COLUMN_SUMS = Operation("column_sums_of_pieces", _column_sums, "sum(x) of each column, in pieces of columns")


def column_product(count: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x w^T + bias `[.., N]` in pieces of N, and the gradient of x `[.., K]` as a node of `count` pieces."""
    return _ColumnProduct.apply(x, weight, bias, count)


def row_product(count: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x w^T `[.., N]` as a node of `count` pieces of K, and the gradient of x `[.., K]` in pieces of K. Raises
    ValueError for a bias, which belongs to the whole sum."""
    if bias is not None:
        raise ValueError("a bias belongs to the whole sum of a matrix that is cut by its inputs")
    return _RowProduct.apply(x, weight, count)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.count = count
        return COLUMNS(operand(x.flatten(0, -2)), weight, bias, count, False).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), count = ctx.saved_tensors, ctx.count
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad, dx, dweight = grads[0].flatten(0, -2), None, None
        if wants_x:
            dx = ADDENDS(grad, weight, count, False).view(x.shape)
        if wants_weight:
            dweight = WEIGHT_GRADIENT(grad, x.flatten(0, -2), count, False)
        return dx, dweight, COLUMN_SUMS(grad, count).to(grad.dtype) if wants_bias else None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.count = count
        return ADDENDS(x.flatten(0, -2), weight, count, True).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), count = ctx.saved_tensors, ctx.count
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad, dx, dweight = operand(grads[0].flatten(0, -2)), None, None
        if wants_x:
            dx = COLUMNS(grad, weight, None, count, True).view(x.shape)
        if wants_weight:
            dweight = WEIGHT_GRADIENT(grad, x.flatten(0, -2), count, True)
        return dx, dweight, None
