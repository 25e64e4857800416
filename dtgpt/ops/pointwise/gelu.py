"""gelu_tanh(x + bias) (Hendrycks and Gimpel 2016, section 2: the approximation by tanh), and its gradient.

Reference: `reference`. Fast path: one Triton kernel each way, fp32 inside. Forward saves x alone, from which backward
computes the rest; backward sums the bias's gradient in the same pass over the data.
Sharding rule: any dimension may be sharded. A shard of the last dimension takes its shard of the bias; a shard of rows
gives a partial sum of the bias's gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.fast import may_fuse
from dtgpt.util.torch_private import is_dtensor


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) in plain torch: the test oracle."""
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) `[.., F]` in x's dtype, for x `[.., F]` and bias `[F]`.

    A bias that is a DTensor is replaced by its local shard, or gathered where x has all columns. Raises ValueError
    where bias and x do not fit.
    """
    bias = local_bias(x, bias)
    return _bias_gelu(x, bias) if may_fuse(x) else reference(x, bias)


def local_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return the bias as a plain tensor that fits x, as `bias_gelu` says. Raises ValueError."""
    if is_dtensor(bias):
        bias = bias.full_tensor() if len(bias) == x.shape[-1] else bias.to_local()
    if bias.shape != x.shape[-1:]:  # the kernels do not check
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit x of shape {tuple(x.shape)}")
    return bias


def kernels():
    from dtgpt.ops.pointwise import gelu_kernels  # imported on first use, since it needs Triton

    return gelu_kernels


_bias_gelu = torch.library.custom_op("dtgpt::bias_gelu", reference, mutates_args=(), device_types="cpu")
_bias_gelu.register_kernel("cuda", lambda x, bias: kernels().bias_gelu_forward(x, bias))
_bias_gelu.register_fake(lambda x, bias: x.new_empty(x.shape))


@torch.library.custom_op("dtgpt::bias_gelu_backward", mutates_args=(), device_types="cpu")
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dbias)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.ops.aten.gelu_backward(dy.to(wide), x.to(wide) + bias, approximate="tanh")
    return dx.to(x.dtype, copy=True), dx.flatten(0, -2).sum(0).to(bias.dtype)


_bias_gelu_backward.register_kernel("cuda", lambda dy, x, bias: kernels().bias_gelu_backward(dy, x, bias))
_bias_gelu_backward.register_fake(lambda dy, x, bias: (x.new_empty(x.shape), bias.new_empty(bias.shape)))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_bias_gelu.register_autograd(lambda ctx, dy: _bias_gelu_backward(dy, *ctx.saved_tensors), setup_context=_save)
