"""Products of rows with the matrices of their experts: a grouped product, of which `linear` is the one with one group.

Rows lie by expert. Behind the last one there may be more, which take no time: what is made of them is not to be read.
An expert without rows takes no time, and its weights are not read. Sharding rule: rows may be sharded between tokens,
each rank with ends of its own; the gradient of the weights is then an addend on each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.operation import Operation


def grouped_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x w^T `[M, out]`, each row by the matrix of its expert, in plain torch: the test oracle. Reads the
    host."""
    *parts, rest = x.split(_sizes(ends, len(x)))
    made = [F.linear(rows, own) for rows, own in zip(parts, weight.unbind(0), strict=True)]
    return torch.cat([*made, x.new_zeros(len(rest), weight.shape[1])] if len(rest) else made)


def _sizes(ends: Tensor, rows: int) -> list[int]:
    """Return how many rows each expert has, and how many there are behind."""
    return ends.diff(prepend=ends.new_zeros(1), append=ends.new_full((1,), rows)).tolist()


def masked_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the same by all products of all rows, with static shapes: the host reads nothing."""
    experts = experts_of_rows(x, ends)[:, None]
    total = x.new_zeros(len(x), weight.shape[1])
    for expert, own in enumerate(weight.unbind(0)):
        total = torch.where(experts == expert, F.linear(x, own), total)
    return total


def experts_of_rows(x: Tensor, ends: Tensor) -> Tensor:
    """Return the expert of each row of x, int64 `[M]`; E for one behind the last."""
    return torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)


# x [M, in], weight [E, out, in] of one dtype, ends int32 [E] with ends[-1] <= M: x[r] w[e]^T for the rows r of e.
grouped_product = Operation("grouped_product", grouped_reference, "x[r] w[e]^T for the rows r of each expert e")


# The same as one op for compilers, which cannot look into what the host reads.
product_op = torch.library.custom_op("dtgpt::grouped_product", grouped_reference, mutates_args=(), device_types="cpu")
product_op.register_fake(lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]))


def _outer(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return dweight `[E, out, in]`: of each expert the sum over its rows of dy `[M, out]` times x `[M, in]`."""
    sizes = _sizes(ends, len(x))
    pairs = zip(dy.split(sizes), x.split(sizes), strict=True)
    return torch.stack([left.t() @ right for left, right in list(pairs)[:-1]])


# dy [M, out], x [M, in], ends int32 [E]: of each expert the sum over its rows of dy times x, [E, out, in].
grouped_outer = Operation("grouped_outer", _outer, "the sum over the rows r of each expert of dy[r] x[r]^T")
outer_op = torch.library.custom_op("dtgpt::grouped_outer", _outer, mutates_args=(), device_types="cpu")
outer_op.register_fake(lambda dy, x, ends: x.new_empty(len(ends), dy.shape[1], x.shape[1]))


def _add_outer(dy: Tensor, x: Tensor, ends: Tensor, total: Tensor, first: bool) -> None:
    made = grouped_outer(dy, x, ends)
    total.copy_(made) if first else total.add_(made)


# dy, x, ends, total fp32 [E, out, in], first: the same, rounded to the type of x; total is set to it first, later the
# sum of both.
ADD_OUTER = Operation("add_outer", _add_outer, "total += what grouped_outer returns")
Fill = Callable[[Tensor, bool], None]  # of a total, and whether to set it, which otherwise is added to
Filler = Callable[[Fill], None]


def fill_total(weight: Tensor, fill: Filler) -> None:
    """Let products with a stack of matrices hand `fill` what adds their gradient to a total, and leave none."""
    weight.fill = fill  # type: ignore[attr-defined]


def filled_part(part: Tensor, fill: Filler) -> Tensor:
    """Return a rank's part of a stack, whose gradient goes to `fill` alone: autograd of torch 2.11 would bring its
    `DTensor` zeros where a product leaves none."""
    part = part.requires_grad_()
    fill_total(part, fill)
    return part


def filler(weight: Tensor) -> Filler | None:
    """Return what a product with the stack hands its gradient to; None: to autograd."""
    return getattr(weight, "fill", None)


def outer_or_fill(dy: Tensor, x: Tensor, ends: Tensor, fill: Filler | None) -> Tensor | None:
    """Return the gradient of a stack; with `fill` it gets what adds it to a total, and there is none."""
    if fill is None:
        return grouped_outer(dy, x, ends)
    fill(lambda total, first: ADD_OUTER(dy, x, ends, total, first))
    return None


class Product(torch.autograd.Function):
    """A product by `multiply`, whose gradients are products as well; that of its weight is handed to `fill`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, fill: Filler | None, multiply: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.fill = fill
        return multiply(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, ends = ctx.saved_tensors
        dx = grouped_product(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
        dweight = outer_or_fill(grad, x, ends, ctx.fill) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None, None


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    dx = product_op(grad, weight.mT, ends) if wants_x else None
    return dx, outer_op(grad, x, ends) if wants_weight else None, None


product_op.register_autograd(_differentiate, setup_context=_save)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, filled: bool = True) -> Tensor:
    """Return x w^T + bias `[M, out]` in x's dtype, for x `[M, in]`, weight `[E, out, in]` and bias `[E, out]` or None.

    ends: int32 `[E]`, the row behind the last one of each expert. filled: whether that of the last expert is M. Raises
    ValueError where shapes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or ends.shape != weight.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and ends {tuple(ends.shape)} do not fit; they need to "
            "be [M, in], [E, out, in] and [E]"
        )
    compiles = torch.compiler.is_compiling()
    fill = None if compiles or not torch.is_grad_enabled() else filler(weight)
    if fill is not None:
        made = Product.apply(x, weight, ends, fill, grouped_product)
    else:
        made = product_op(x, weight, ends) if x.is_cpu and compiles else grouped_product(x, weight, ends)
    if bias is None:
        return made
    biases = biases_of_rows(bias, x, ends)
    if not filled:  # gradients of rows behind the last one may be anything, NaN too, and zero times that is no zero
        biases = torch.where((experts_of_rows(x, ends) < len(ends))[:, None], biases, 0)
    return made + biases


def biases_of_rows(bias: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the bias `[M, out]` of each row of x, of biases `[E, out]`. As a product with zeros and ones it is exact,
    and its gradient adds rows without atomic additions, as that of an index would."""
    known = torch.arange(len(bias), device=x.device)
    return (experts_of_rows(x, ends)[:, None] == known).to(x.dtype) @ bias


class Groups(NamedTuple):
    """The rows of experts, and the product of each with the matrix of its expert: arguments of `grouped_linear`."""

    ends: Tensor
    filled: bool

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return grouped_linear(x, weight, bias, *self)
