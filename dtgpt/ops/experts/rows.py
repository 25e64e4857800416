"""Rows of tokens in the order of experts, and the way back.

A token is a row for each of its experts. Rows are sorted by (expert, token), so that each expert's lie together, in an
order that follows from the choice alone. On the way back a token adds its rows, times their weights, in the order of
its slots, in fp32, rounded once. Nothing here adds in an order that could change: no atomic additions, forward or
backward. All shapes follow from those of the inputs, and the host reads nothing. Sharding rule: tokens may be sharded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.attention.shared import SUM_ROWS, sum_rows
from dtgpt.ops.operation import Operation


class Order(NamedTuple):
    """Where M = N k rows are that N tokens have in k slots."""

    tokens: Tensor  # int64 [M]: the token of each row
    slots: Tensor  # int64 [M]: the slot of each row among all N k
    places: Tensor  # int64 [N, k]: the row of each slot; -1: it has none here
    ends: Tensor  # int32 [E]: the row behind the last one of each expert


def _sorted_rows(experts: Tensor, count: int) -> Order:
    flat = experts.flatten()
    by_expert, slots = flat.sort(stable=True)
    rows = torch.arange(len(flat), device=flat.device)
    places = torch.empty_like(slots).scatter_(0, slots, rows).view(experts.shape)
    known = torch.arange(count, device=flat.device)
    ends = torch.searchsorted(by_expert, known, right=True, out_int32=True)
    return Order(slots.div(experts.shape[1], rounding_mode="floor"), slots, places, ends)


# experts int64 `[N, k]`, each once in a row, and their number: the order of rows by (expert, token).
sorted_rows = Operation("sorted_rows", _sorted_rows, "rows by (expert, token)")


class _Gathered(torch.autograd.Function):
    """Rows of tokens, in whose gradients each token adds those of its rows in the order of slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(order.places)
        return spread_rows(x.contiguous(), order.places, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return sum_of_rows(grad.contiguous(), places), None


def gathered(x: Tensor, order: Order) -> Tensor:
    """Return the rows `[M, H]` of tokens x `[N, H]`."""
    return _Gathered.apply(x, order)


def _weighted(y: Tensor, weights: Tensor | None, places: Tensor, wide: bool = False) -> Tensor:
    kind = torch.promote_types(y.dtype, torch.float32 if weights is None else weights.dtype)
    total = torch.zeros(len(places), y.shape[1], dtype=kind, device=y.device)
    for slot, column in enumerate(places.unbind(1)):
        rows = y.index_select(0, column.clamp(min=0)).to(kind)
        rows = rows if weights is None else weights[:, slot, None] * rows
        total = total + torch.where(column[:, None] < 0, 0, rows)
    return total if wide else total.to(y.dtype)


def _weighted_gradients(
    grad: Tensor, y: Tensor, weights: Tensor, places: Tensor, tokens: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(y.dtype, weights.dtype)
    dy = (weights.flatten()[slots, None] * grad.index_select(0, tokens).to(wide)).to(y.dtype)
    held = places.clamp(min=0)
    products = ((grad.to(wide) * y.index_select(0, column).to(wide)).sum(-1) for column in held.unbind(1))
    return dy, torch.where(places < 0, 0, torch.stack(list(products), 1)).to(weights.dtype)


def _spread(x: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    return x.index_select(0, tokens)


SPREAD_ROWS = Operation("spread_rows", _spread, "y[places[t, j]] = x[t]")
WEIGHTED_ROWS = Operation("weighted_rows", _weighted, "y[t] = the sum over j of w[t, j] x[places[t, j]]")
WEIGHTED_ROWS_GRADIENTS = Operation(
    "weighted_rows_gradients", _weighted_gradients, "w[t, j] dy[t], and the product of dy[t] and x[places[t, j]]"
)


@torch.library.custom_op("dtgpt::spread_rows", mutates_args=())
def _spread_op(x: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    return SPREAD_ROWS(x, places, tokens)


@_spread_op.register_fake
def _(x: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    return x.new_empty(len(tokens), x.shape[1])


@torch.library.custom_op("dtgpt::weighted_rows", mutates_args=())
def _weighted_op(y: Tensor, weights: Tensor | None, places: Tensor, wide: bool = False) -> Tensor:
    return WEIGHTED_ROWS(y, weights, places, wide)


@_weighted_op.register_fake
def _(y: Tensor, weights: Tensor | None, places: Tensor, wide: bool = False) -> Tensor:
    kind = torch.promote_types(y.dtype, torch.float32) if wide else y.dtype
    return y.new_empty(len(places), y.shape[1], dtype=kind)


@torch.library.custom_op("dtgpt::weighted_rows_gradients", mutates_args=())
def _gradients_op(
    grad: Tensor, y: Tensor, weights: Tensor, places: Tensor, tokens: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    return WEIGHTED_ROWS_GRADIENTS(grad, y, weights, places, tokens, slots)


@_gradients_op.register_fake
def _(grad: Tensor, y: Tensor, weights: Tensor, places: Tensor, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)


def plain_on_cpu(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a custom op, but in eager execution on a CPU the function that it is made of: at the first call
    of an op that is written in Python, torch imports its compiler, which takes a second."""

    def call(x: Tensor, *more: Any) -> Any:
        is_op = x.is_cuda or type(x) is not Tensor or torch.compiler.is_compiling()
        return op(x, *more) if is_op else function(x, *more)

    return call


# x, places, tokens int64 `[M]`: the rows `[M, H]` of tokens x `[N, H]`, each in all of its places `[N, k]`, but -1.
spread_rows = plain_on_cpu(SPREAD_ROWS, _spread_op)
# y, weights, places: the sums `[N, H]` over a token's slots of weight `[N, k]`, None: 1, times row of y `[M, H]`, but
# -1, in y's dtype; wide: in that of the sums, fp32 at least.
weighted_rows = plain_on_cpu(WEIGHTED_ROWS, _weighted_op)
# grad, y, weights, places, tokens, slots: the gradients of y, of which rows without a slot may be anything, and of the
# weights, zero where a slot has no row.
weighted_rows_gradients = plain_on_cpu(WEIGHTED_ROWS_GRADIENTS, _gradients_op)
# x, table: the sums `[N, H]` of the rows of x `[M, H]` in each row of the table, int64 `[N, k]`, in their order.
sum_of_rows = plain_on_cpu(SUM_ROWS, sum_rows)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(y, weights, order.places, order.tokens, order.slots)
        return weighted_rows(y, weights, order.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return *weighted_rows_gradients(grad.contiguous(), *ctx.saved_tensors), None


def summed(y: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Return for each token `[N, H]` the sum of its rows of y `[M, H]`, times weights `[N, k]`, in the order of its
    slots."""
    return _Summed.apply(y, weights, order)
