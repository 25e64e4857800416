"""Stacks of matrices of experts in pieces of their width, which tensor parallelism cuts.

As `products`, of the rows of each expert. Of a row, pieces are added in the tree, and then what the ranks have, before
anything else is made of it: the outputs of a token's experts, weighted and added, the gradients of its weights, its
router and its biases are all made of whole rows, by all ranks alike. Pieces that were weighted and added first would
send fewer numbers; but each would then be a sum over rows of other ranks of experts, and P of them would have to be
made, where here the rows of a piece go into the tree one after the other.

Shapes: M rows, E experts, F width, P pieces of a rank.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.experts.products import (
    Groups,
    biases_of_rows,
    grouped_outer,
    grouped_product,
)
from dtgpt.ops.linear import linear
from dtgpt.ops.operation import Operation
from dtgpt.parallel.exact_tp.build import Sum
from dtgpt.parallel.exact_tp.products import column_product, operand, pieces_of, row_product
from dtgpt.parallel.exact_tp.rows import _Shifted
from dtgpt.parallel.exact_tp.tree import tree_sum

ONES = 8  # columns, as few as kernels of 16 bits take


def product(x: Tensor, weight: Tensor, ends: Tensor, by_inputs: bool) -> Tensor:
    """Return of each row x w^T, of the weights `[E, N, K]` of its expert by their inputs, or x w of weights
    `[E, K, N]`. Experts have the same bits wherever their rows and weights lie: in kernels by one chain each, on a CPU
    by operands of their own."""
    if not x.is_cpu:
        return grouped_product(x, weight if by_inputs else weight.mT, ends)
    pairs = zip(_of_experts(x, ends), weight.unbind(), strict=True)
    made = [linear(rows, operand(w), None) if by_inputs else rows @ operand(w) for rows, w in pairs]
    behind = x.new_zeros(len(x) - sum(map(len, made)), weight.shape[1 if by_inputs else 2])
    return torch.cat([*made, behind])


def outer(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return of each expert the sum over its rows of dy `[M, N]` times x `[M, K]`, `[E, N, K]`; as `product`."""
    if not x.is_cpu:
        return grouped_outer(dy, x, ends)
    pairs = zip(_of_experts(dy, ends), _of_experts(x, ends), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _of_experts(x: Tensor, ends: Tensor) -> list[Tensor]:
    """Return the rows of each expert. Reads the host."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return [operand(rows) for rows in x[: sum(sizes)].split(sizes)]


def addends(
    cut: Callable[..., Iterable[Tensor]], x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool
) -> Tensor:
    """Return what `ADDENDS` does. cut: returns the pieces of a tensor, a number of them along a dimension."""
    pairs = zip(cut(x, count, 1), cut(weight, count, 2 if by_inputs else 1), strict=True)
    return tree_sum(product(part, w, ends, by_inputs) for part, w in pairs)


def _columns(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> Tensor:
    weights = pieces_of(weight, count, 2 if by_inputs else 1)
    return torch.cat([product(x, w, ends, not by_inputs) for w in weights], dim=1)


def _weight_gradient(dy: Tensor, x: Tensor, ends: Tensor, count: int, by_inputs: bool) -> Tensor:
    if by_inputs:
        return torch.cat([outer(dy, part, ends) for part in pieces_of(x, count, 1)], dim=2)
    return torch.cat([outer(part, x, ends) for part in pieces_of(dy, count, 1)], dim=1)


# x `[M, K]`, weight, ends int32 `[E]`, count, by_inputs: of each row x w^T, of the weights `[E, N, K]` of its expert by
# their inputs, or x w of weights `[E, K, N]`, as a node of `count` pieces of K.
ADDENDS = Operation("addends_of_stacks", partial(addends, pieces_of), "x[r] w[e], pieces of K added in a tree")
# The same, x w of weights `[E, K, N]` by their inputs or x w^T of weights `[E, N, K]`, in `count` pieces of N.
COLUMNS = Operation("columns_of_stacks", _columns, "x[r] w[e], in pieces of columns")
# dy `[M, N]`, x `[M, K]`, ends, count, by_inputs: dy^T x `[E, N, K]` of the rows of each expert, in `count` pieces of K
# by the inputs of the weight, or N.
WEIGHT_GRADIENT = Operation("weight_gradient_of_stacks", _weight_gradient, "dy^T x of each expert, in pieces")


def column_stack(
    count: int, sums: Sum | None, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups
) -> Tensor:
    """Return x w^T + bias `[M, N]` in `count` pieces of N, of rows x `[M, K]`, whose gradient is whole on each rank.

    weight: `[E, N, K]` and bias `[E, N]`, what this rank has of them. sums: None where there is one rank.
    """
    made = _ColumnStack.apply(x if sums is None else Entered.apply(x, sums), weight, groups.ends, count)
    return _with_biases(made, bias, groups, count)


def row_stack(count: int, sums: Sum | None, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """Return x w^T + bias `[M, N]`, whole on each rank, of `count` pieces of K of rows x `[M, K]`.

    weight: `[E, N, K]`, what this rank has of it; bias: `[E, N]` or None. sums: None where there is one rank.
    """
    made = _RowStack.apply(x, weight, groups.ends, count)
    return _with_biases(made if sums is None else Summed.apply(made, sums), bias, groups, 1)


def inner_column(count: int, sums: Sum | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `column_product` does, within a branch: of x `[.., K]` that is whole on each rank, the gradient,
    too."""
    return column_product(count, x if sums is None else Entered.apply(x, sums), weight, bias)


def inner_row(count: int, sums: Sum | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `row_product` does, `[.., N]`, within a branch: whole on each rank."""
    made = row_product(count, x, weight, bias)
    return made if sums is None else Summed.apply(made, sums)


def _with_biases(made: Tensor, bias: Tensor | None, groups: Groups, count: int) -> Tensor:
    """Return rows `[M, N]` and the bias of each, of biases `[E, N]`, whose gradients come in `count` pieces of N."""
    if bias is None:
        return made
    biases = biases_of_rows(bias.detach(), made, groups.ends)
    return _Shifted.apply(made + biases, bias, partial(_bias_gradient, groups.ends, count))


def _bias_gradient(ends: Tensor, count: int, dy: Tensor) -> Tensor:
    """Return the sum over the rows of each expert of dy `[M, N]`, `[E, N]`: as a product with ones it has an order that
    does not depend on other rows."""
    ones = dy.new_ones(len(dy), ONES)
    return torch.cat([outer(part, ones, ends)[..., 0] for part in pieces_of(dy, count, 1)], dim=1)


class Entered(torch.autograd.Function):
    """Return x as it is, of which each rank makes a part of what follows: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Sum) -> Tensor:
        ctx.sums = sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.sums(grads[0]), None


class Summed(torch.autograd.Function):
    """Return the sum over the ranks, which goes on alike on each."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, sums: Sum) -> Tensor:
        return sums(addend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _ColumnStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.count = count
        return COLUMNS(operand(x), weight, ends, count, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight, ends), count, dx, dweight = ctx.saved_tensors, ctx.count, None, None
        if ctx.needs_input_grad[0]:
            dx = ADDENDS(grads[0], weight, ends, count, False)
        if ctx.needs_input_grad[1]:
            dweight = WEIGHT_GRADIENT(grads[0], operand(x), ends, count, False)
        return dx, dweight, None, None


class _RowStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.count = count
        return ADDENDS(x, weight, ends, count, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight, ends), count, dx, dweight = ctx.saved_tensors, ctx.count, None, None
        grad = operand(grads[0])
        if ctx.needs_input_grad[0]:
            dx = COLUMNS(grad, weight, ends, count, True)
        if ctx.needs_input_grad[1]:
            dweight = WEIGHT_GRADIENT(grad, x, ends, count, True)
        return dx, dweight, None, None
