"""gelu_tanh(x + bias) (Hendrycks and Gimpel 2016, the approximation by tanh), and its gradient.

Reference: `reference`. Fast path: one Triton kernel each way, fp32 inside; forward saves only x, from which backward
computes again, and backward sums the bias's gradient in the same pass over the data.
Sharding rule: any cut. Where the last dimension is cut, so is the bias; where rows are cut, the bias's gradient is a
partial sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dtgpt.ops.fast import may_fuse


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """The test oracle."""
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x `[.., F]`, bias `[F]` -> gelu_tanh(x + bias) `[.., F]`, in x's dtype. Of a DTensor as bias of a plain x the
    local part counts: x is then what a matrix cut along with the bias has made."""
    if isinstance(bias, DTensor) and not isinstance(x, DTensor):
        bias = bias.full_tensor() if len(bias) == x.shape[-1] else bias.to_local()
    if bias.shape != x.shape[-1:]:  # kernels believe it
        raise ValueError(f"a bias of {tuple(bias.shape)} does not fit x of {tuple(x.shape)}")
    return _bias_gelu(x, bias) if may_fuse(x) else reference(x, bias)


@torch.library.custom_op("dtgpt::bias_gelu", mutates_args=(), device_types="cpu")
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return reference(x, bias)


@_bias_gelu.register_kernel("cuda")
def _(x: Tensor, bias: Tensor) -> Tensor:
    from dtgpt.ops.gelu_kernels import bias_gelu_forward

    return bias_gelu_forward(x, bias)


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dtgpt::bias_gelu_backward", mutates_args=(), device_types="cpu")
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.ops.aten.gelu_backward(dy.to(wide), x.to(wide) + bias, approximate="tanh")
    return dx.to(x.dtype, copy=True), dx.flatten(0, -2).sum(0).to(bias.dtype)


@_bias_gelu_backward.register_kernel("cuda")
def _(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from dtgpt.ops.gelu_kernels import bias_gelu_backward

    return bias_gelu_backward(dy, x, bias)


@_bias_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_bias_gelu.register_autograd(lambda ctx, dy: _bias_gelu_backward(dy, *ctx.saved_tensors), setup_context=_save)


def _cuts(dims: int) -> list[tuple]:
    """(placement of x, of the bias, of the bias's gradient)."""
    rows = [(Shard(dim), Replicate(), Partial()) for dim in range(dims - 1)]
    return [(Replicate(), Replicate(), Replicate()), (Shard(dims - 1), Shard(0), Shard(0)), *rows]


@register_sharding(torch.ops.dtgpt.bias_gelu.default)
def _(x, bias):
    return [([data], [data, vector]) for data, vector, _ in _cuts(x.ndim)]


@register_sharding(torch.ops.dtgpt.bias_gelu_backward.default)
def _(dy, x, bias):
    return [([data, total], [data, data, vector]) for data, vector, total in _cuts(x.ndim)]
