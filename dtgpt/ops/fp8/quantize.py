"""Quantisation to 8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): e4m3fn or e5m2.

A value becomes saturate(round(value * scale)), rounded to nearest even. The scale is a power of two that the caller
chose before it saw the values, so that the same value gives the same 8 bits wherever a tensor is cut. Reference:
`reference`. Fast path: one Triton kernel that reads the tensor once for both orders, the largest magnitude and the
column sum. Sharding rule: any dimension may be sharded; amax is then that of the shard, the column sum a partial one.
"""

import torch
from torch import Tensor

from dtgpt.ops.fp8.product import ROWS
from dtgpt.ops.kernels.bias import reference as column_sum
from dtgpt.ops.kernels.devices import has_triton


def reference(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, rows: bool, columns: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, q_t, column sum) in plain torch: the test oracle. What is not wanted is empty."""
    x = x.reshape(-1, x.shape[-1])
    if amax is not None and x.numel():
        amax.copy_(torch.maximum(amax, x.abs().amax()))
    limit = torch.finfo(dtype).max
    scaled = (x.float() * scale).clamp(-limit, limit)
    q = torch.where(x.isfinite(), scaled, torch.nan).to(dtype)
    q_t = q.t().clone(memory_format=torch.contiguous_format) if columns else q.new_empty(0)
    return q if rows else q.new_empty(0), q_t, column_sum(x) if sums else x.new_empty(0)


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Return (q `[R, C]`, q_t `[C, R]`) of x `[.., C]`: its values times `scale` in `dtype`, in row order and
    transposed; empty where `rows` or `columns` is False.

    scale: fp32 scalar tensor, a power of two. dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`. amax: fp32 scalar
    tensor, which is raised to the largest magnitude of x (NaN where x has one), or None. Finite values saturate; inf
    and NaN become NaN. Not differentiable.
    """
    return _quantize(x, scale, dtype, amax, rows, columns, False)[:2]


def quantize_and_sum(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize` does and the sum of x over its rows `[C]` in x's dtype, accumulated in fp32: of the
    gradient of a linear map's output the gradient of its bias."""
    return _quantize(x, scale, dtype, amax, rows, columns, True)


def transposed(q: Tensor) -> Tensor:
    """Return q_t `[C, R]` of q `[R, C]` of an 8-bit type, contiguous. Not differentiable."""
    return _transposed(q.view(torch.uint8)).view(q.dtype)


def has_kernel(x: Tensor) -> bool:
    """Return whether a kernel can work on x `[.., C]`: whether its rows are a multiple of ROWS."""
    return has_triton(x) and x.numel() > 0 and x.numel() // x.shape[-1] % ROWS == 0


def kernels():
    from dtgpt.ops.kernels import quantize_kernels  # imported on first use, since it needs Triton

    return quantize_kernels


_quantize = torch.library.custom_op("dtgpt::quantize", reference, mutates_args=("amax",), device_types="cpu")
_quantize.register_kernel("cuda", lambda x, *rest: (kernels().quantize if has_kernel(x) else reference)(x, *rest))


def _transposed_reference(q: Tensor) -> Tensor:
    return q.t().clone(memory_format=torch.contiguous_format)


_transposed = torch.library.custom_op(
    "dtgpt::transposed_bytes", _transposed_reference, mutates_args=(), device_types="cpu"
)
_transposed.register_kernel("cuda", lambda q: (kernels().transpose if has_kernel(q) else _transposed_reference)(q))


@_transposed.register_fake
def _(q):
    return q.new_empty(q.shape[1], q.shape[0])


@_quantize.register_fake
def _(x, scale, dtype, amax, rows, columns, sums):
    width = x.shape[-1]
    height = x.numel() // width
    return (
        x.new_empty((height, width) if rows else 0, dtype=dtype),
        x.new_empty((width, height) if columns else 0, dtype=dtype),
        x.new_empty(width if sums else 0),
    )
