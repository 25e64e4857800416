"""What serves products of experts' rows, the sums of a token's rows, and their order.

In bf16 on Hopper GPUs the products are a kernel's that computes whole tiles, or PyTorch's own `_grouped_mm`, of which
autograd knows the gradients; elsewhere a Triton kernel each way. All sum K in one chain, so that a row's bits do not
depend on the rows beside it, and gradients of weights sum an expert's rows in their order.
"""

from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.experts.products import (
    Product,
    filler,
    grouped_product,
    masked_product,
    outer_op,
    outer_or_fill,
    product_op,
)
from dtgpt.ops.experts.rows import Order
from dtgpt.ops.kernels.devices import (
    by_triton,
    has_hopper,
    has_triton,
    may_fuse,
    takes_custom_op,
    why_below,
    why_no_triton,
)
from dtgpt.ops.kernels.pointwise import swiglu_kernels
from dtgpt.ops.operation import Kernel
from dtgpt.util.shared.gpu_limits import HOPPER
from dtgpt.util.torch_private import is_dtensor

ALIGNED = 8  # elements of bf16 in the 16 bytes at whose multiples rows have to begin
BYTES = 16  # at whose multiples the copy engine reads and writes
MOST_SORTED = 256  # experts that kernels rank, and sort by
SERVED = (torch.float32, torch.bfloat16, torch.float16)


def expert_kernels():
    from dtgpt.ops.kernels import expert_kernels  # imported on first use, since it needs Triton

    return expert_kernels


def _takes_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    sizes = x.shape[1] % ALIGNED == weight.shape[1] % ALIGNED == 0
    return x.dtype == torch.bfloat16 and sizes and (x.is_meta or has_hopper(x.device)) and len(x) > 0


def _by_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.mT, offs=ends)


product_op.register_kernel("cuda", lambda x, weight, ends: expert_kernels().grouped_product(x, weight, ends))
outer_op.register_kernel("cuda", lambda dy, x, ends: expert_kernels().grouped_outer(dy, x, ends))


def _takes_product(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    return x.dtype in SERVED and takes_custom_op(x, has_parameters=True)


def _why_no_grouped_mm(device: torch.device) -> str | None:
    return why_below(HOPPER, device)


def grouped_kernels():
    from dtgpt.ops.kernels import grouped_kernels  # imported on first use, since it needs Triton

    return grouped_kernels


def _takes_tiles(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    if x.dtype != torch.bfloat16 or weight.dtype != x.dtype or not may_fuse(x) or torch.compiler.is_compiling():
        return False
    aligned = (x.data_ptr() | weight.data_ptr()) % BYTES == 0
    return aligned and has_hopper(x.device) and grouped_kernels().serves(len(x), weight)


def _by_tiles(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return Product.apply(x, weight, ends, None, _by_tiles)
    return grouped_kernels().grouped_product(x, weight, ends)[0]


def _why_no_tiles(device: torch.device) -> str | None:
    return why_no_triton(device) or why_below(HOPPER, device)


GROUPED_PRODUCT = (
    Kernel(
        "Triton by tiles",
        _takes_tiles,
        _by_tiles,
        _why_no_tiles,
        "bf16, 64 rows an expert, K of 64 k and N of 128 k terms; not compiled",
    ),
    Kernel(
        "PyTorch's _grouped_mm",
        _takes_grouped_mm,
        _by_grouped_mm,
        _why_no_grouped_mm,
        f"in bf16, of widths that are multiples of {ALIGNED}",
    ),
    Kernel("Triton", _takes_product, product_op, why_no_triton, "in other types or widths"),
    Kernel(
        "PyTorch, all rows by each expert",
        lambda x, weight, ends: not x.is_cpu,
        masked_product,
        lambda device: None if device.type == "cuda" else "it runs on GPUs",
        "of what Triton does not take, such as a schedule that splits backward in other types than bf16",
    ),
)


GROUPED_OUTER = (
    Kernel(
        "PyTorch's _grouped_mm",
        lambda dy, x, ends: _takes_grouped_mm(x, dy, ends),
        lambda dy, x, ends: torch._grouped_mm(dy.mT, x, offs=ends),
        _why_no_grouped_mm,
        f"in bf16, of widths that are multiples of {ALIGNED}",
    ),
    Kernel("Triton", _takes_product, outer_op, why_no_triton, "in other types or widths"),
)


def _adds_outer(dy: Tensor, x: Tensor, ends: Tensor, total: Tensor, first: bool) -> bool:
    known = dy.dtype == torch.bfloat16 and has_triton(dy) and has_hopper(dy.device) and total.data_ptr() % BYTES == 0
    return known and outer_kernels().serves(dy.shape[1], x.shape[1])


def outer_kernels():
    from dtgpt.ops.kernels import outer_kernels  # imported on first use, since it needs Triton

    return outer_kernels


ADD_OUTER = (
    Kernel(
        "Triton",
        _adds_outer,
        lambda *given: outer_kernels().add_outer(*given),
        _why_no_tiles,
        "bf16, widths of 128 k",
    ),
)


class _Inner(torch.autograd.Function):
    """Rows by first matrices, and SwiGLU of them; backward keeps the rows and what the function is of."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        pairs, inner = grouped_kernels().grouped_product(rows, weight, ends, activate=True)
        ctx.save_for_backward(rows, pairs, weight, ends)
        ctx.fill = filler(weight)
        return inner

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, pairs, weight, ends = ctx.saved_tensors
        dpairs = swiglu_kernels().swiglu_backward(grad, pairs, ends=ends)
        drows = grouped_product(dpairs, weight.mT, ends) if ctx.needs_input_grad[0] else None
        return drows, outer_or_fill(dpairs, rows, ends, ctx.fill) if ctx.needs_input_grad[1] else None, None


def _makes_inner(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, activation: str) -> bool:
    return bias is None and activation == "silu" and _takes_tiles(rows, weight, ends)


INNER = (
    Kernel(
        "Triton by tiles",
        _makes_inner,
        lambda rows, weight, bias, ends, activation: _Inner.apply(rows, weight, ends),
        _why_no_tiles,
        "SwiGLU without biases, as grouped_product by tiles",
    ),
)


@torch.library.custom_op("dtgpt::wide_product", mutates_args=(), device_types="cuda")
def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    from dtgpt.ops.kernels.decode.blocks import product  # imported on first use, since it needs Triton

    made = product(x.flatten(0, -2).contiguous(), weight.contiguous(), None, "logits", exact=True)
    return made.view(*x.shape[:-1], len(weight))


@_wide_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32)


def _takes_wide_product(x: Tensor, weight: Tensor) -> bool:
    narrow = x.dtype == weight.dtype in (torch.bfloat16, torch.float16) and x.numel() > 0
    return narrow and has_triton(x) and not is_dtensor(weight)


WIDE_PRODUCT = (by_triton(_wide_product, _takes_wide_product, "in 16 bits"),)


def _gradients_by_parts(
    grad: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Multiply the gradient in three parts of 8 bits each, which bf16 holds exactly, and add the products in fp32."""
    rest, parts = grad.flatten(0, -2), []
    for _ in range(3):
        parts.append(rest.to(x.dtype))
        rest = rest - parts[-1]
    joined = torch.cat(parts, 1)
    dx = (joined @ weight.repeat(3, 1)).view_as(x) if wants_x else None
    if not wants_weight:
        return dx, None
    sums = torch.mm(joined.t(), x.flatten(0, -2), out_dtype=torch.float32)
    return dx, sums.view(3, *weight.shape).sum(0).to(weight.dtype)


def _takes_parts(grad: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool) -> bool:
    return grad.is_cuda and grad.dtype == torch.float32 and x.dtype == weight.dtype == torch.bfloat16


WIDE_PRODUCT_GRADIENTS = (
    Kernel(
        "PyTorch, by 16-bit parts of dy",
        _takes_parts,
        _gradients_by_parts,
        lambda device: None if device.type == "cuda" else "it runs on GPUs",
        "in bf16",
    ),
)


def _sums(x: Tensor, *_: Any) -> bool:
    return x.dtype in SERVED and has_triton(x)


SPREAD_ROWS = (by_triton(lambda x, places, tokens: expert_kernels().spread_rows(x, places, len(tokens)), _sums),)


def _weighted_rows(y: Tensor, weights: Tensor | None, places: Tensor, wide: bool = False) -> Tensor:
    return expert_kernels().weighted_rows(y, weights, places, torch.float32 if wide else None)


WEIGHTED_ROWS = (by_triton(_weighted_rows, _sums),)
WEIGHTED_ROWS_GRADIENTS = (by_triton(lambda *given: expert_kernels().weighted_rows_gradients(*given), _sums),)


def sort_kernels():
    from dtgpt.ops.kernels import sort_kernels  # imported on first use, since it needs Triton

    return sort_kernels


@torch.library.custom_op("dtgpt::ranked", mutates_args=(), device_types="cuda")
def _ranked(scores: Tensor, count: int) -> Tensor:
    return sort_kernels().ranked(scores, count)


@_ranked.register_fake
def _(scores: Tensor, count: int) -> Tensor:
    return scores.new_empty(*scores.shape[:-1], count, dtype=torch.int64)


@torch.library.custom_op("dtgpt::sorted_rows", mutates_args=(), device_types="cuda")
def _sorted_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return sort_kernels().sorted_rows(experts, count)


@_sorted_rows.register_fake
def _(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, slots = (experts.new_empty(experts.numel()) for _ in range(2))
    return tokens, slots, torch.empty_like(experts), experts.new_empty(count, dtype=torch.int32)


def _ranks(scores: Tensor, count: int) -> bool:
    few = scores.dtype == torch.float32 and scores.shape[-1] <= MOST_SORTED
    return few and has_triton(scores) and scores.numel() > 0


def _sorts(experts: Tensor, count: int) -> bool:
    return has_triton(experts) and count <= MOST_SORTED and experts.numel() > 0


FEW = f"up to {MOST_SORTED} experts"
RANKED = (by_triton(_ranked, _ranks, FEW),)
SORTED_ROWS = (by_triton(lambda *given: Order(*_sorted_rows(*given)), _sorts, FEW),)
