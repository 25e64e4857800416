"""A linear map whose bias gradient is a two-stage column sum.

PyTorch's own kernel for that sum is far from the memory's bandwidth at GPT-2's sizes. The matrix products stay `aten`
operations, visible to the compiler and to DTensor: forward adds the bias in the product's epilogue, backward computes
dx = dy w and dw = dy^T x. Sharding rule: those of `F.linear` and of `dtgpt.ops.pointwise.bias`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.fast import may_fuse
from dtgpt.ops.pointwise.bias import bias_gradient


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x w^T + bias `[.., out]`. x: `[.., in]`; weight: `[out, in]`; bias: `[out]` or None; all of one dtype."""
    if bias is None or not may_fuse(x):
        return F.linear(x, weight, bias)
    return linear_by_column_sum(x, weight, bias)


def linear_by_column_sum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `F.linear`, with a bias gradient by `bias_gradient`."""
    return _BiasGradient.apply(F.linear(x, weight, bias.detach()), bias)


class _BiasGradient(torch.autograd.Function):
    """Return `y`, to which the detached bias has been added already, and differentiate it in the bias."""

    @staticmethod
    def forward(y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, bias_gradient(grad) if ctx.needs_input_grad[1] else None
