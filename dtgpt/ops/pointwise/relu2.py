"""relu(x + bias)^2 (So et al. 2021, Primer), and its gradient.

Reference: `reference`. Fast path: the Triton kernels of `gelu`, fp32 inside. Forward saves x alone; backward sums the
bias's gradient in the same pass over the data.
Sharding rule: that of `dtgpt.ops.pointwise.gelu`.
"""

import torch
from torch import Tensor

from dtgpt.ops.kernels.devices import takes_custom_op
from dtgpt.ops.pointwise.gelu import kernels, local_bias


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 in plain torch: the test oracle."""
    return (x + bias.to(x.dtype)).relu().square()


def bias_relu2(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 `[.., F]` in x's dtype; arguments and errors as of `bias_gelu`."""
    bias = local_bias(x, bias)
    return _bias_relu2(x, bias) if takes_custom_op(x, has_parameters=True) else reference(x, bias)


_bias_relu2 = torch.library.custom_op("dtgpt::bias_relu2", reference, mutates_args=(), device_types="cpu")
_bias_relu2.register_kernel("cuda", lambda x, bias: kernels().bias_gelu_forward(x, bias, relu2=True))
_bias_relu2.register_fake(lambda x, bias: x.new_empty(x.shape))


@torch.library.custom_op("dtgpt::bias_relu2_backward", mutates_args=(), device_types="cpu")
def _bias_relu2_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dbias)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = dy.to(wide) * 2 * (x.to(wide) + bias).relu()
    return dx.to(x.dtype, copy=True), dx.flatten(0, -2).sum(0).to(bias.dtype)


_bias_relu2_backward.register_kernel("cuda", lambda dy, x, bias: kernels().bias_gelu_backward(dy, x, bias, relu2=True))
_bias_relu2_backward.register_fake(lambda dy, x, bias: (x.new_empty(x.shape), bias.new_empty(bias.shape)))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_bias_relu2.register_autograd(lambda ctx, dy: _bias_relu2_backward(dy, *ctx.saved_tensors), setup_context=_save)
