"""Activation functions of an MLP whose results exist in 8 bits only: bias and tanh-GELU, and SwiGLU.

Each value is rounded to x's dtype before it is quantised, so that it equals that of the plain function followed
by `quantize`, which is the reference. Fast path: one Triton kernel each way that writes both orders.
Sharding rule: those of `bias_gelu`, `swiglu` and `quantize`.
"""

import torch
from torch import Tensor

from dtgpt.ops.activations import gelu_reference, swiglu_reference
from dtgpt.ops.fp8 import quantize
from dtgpt.ops.kernels.bias import reference as column_sum
from dtgpt.ops.kernels.pointwise import swiglu_backward


def reference_forward(
    x: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, columns: bool
) -> tuple[Tensor, Tensor]:
    """Return what `activation_forward` does, in plain torch: the test oracle."""
    y = swiglu_reference(x) if bias is None else gelu_reference(x, bias)
    return quantize.reference(y, scale, dtype, amax, True, columns, False)[:2]


def reference_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `activation_backward` does, in plain torch: the test oracle."""
    if bias is None:
        dx, d_bias = swiglu_backward(dy, x), x.new_empty(0)
    else:
        dx = torch.ops.aten.gelu_backward(dy, x + bias.to(x.dtype), approximate="tanh")
        d_bias = column_sum(dx).to(bias.dtype, copy=True)
    return *quantize.reference(dx, scale, dtype, amax, True, True, False)[:2], d_bias


def _has_kernel(x: Tensor) -> bool:
    return quantize.has_kernel(x) and x.dtype == torch.bfloat16


def kernels():
    from dtgpt.ops.kernels import activation_kernels  # imported on first use, since it needs Triton

    return activation_kernels


activation_forward = torch.library.custom_op(
    "dtgpt::float8_activation", reference_forward, mutates_args=("amax",), device_types="cpu"
)
activation_forward.register_kernel(
    "cuda", lambda x, *rest: (kernels().forward if _has_kernel(x) else reference_forward)(x, *rest)
)


@activation_forward.register_fake
def _(x, bias, scale, dtype, amax, columns):
    width = x.shape[-1] // (2 if bias is None else 1)
    height = x.numel() // x.shape[-1]
    return x.new_empty(height, width, dtype=dtype), x.new_empty((width, height) if columns else (0,), dtype=dtype)


activation_backward = torch.library.custom_op(
    "dtgpt::float8_activation_backward", reference_backward, mutates_args=("amax",), device_types="cpu"
)
activation_backward.register_kernel(
    "cuda", lambda dy, *rest: (kernels().backward if _has_kernel(dy) else reference_backward)(dy, *rest)
)


@activation_backward.register_fake
def _(dy, x, bias, scale, dtype, amax):
    width, height = x.shape[-1], x.numel() // x.shape[-1]
    d_bias = x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(height, width, dtype=dtype), x.new_empty(width, height, dtype=dtype), d_bias
