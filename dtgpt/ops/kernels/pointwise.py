"""What serves the functions between two matrices: `bias_gelu`, `bias_relu2`, `swiglu` and `gated`.

One Triton kernel each way, fp32 inside. Forward saves x alone, from which backward computes the rest; with a bias
backward sums its gradient in the same pass over the data. Of the gates of `gated` Triton computes gelu_tanh, and
PyTorch's operations the others, which save x alone, too.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from dtgpt.ops.activations import gelu_reference, swiglu_reference, wide_pairs
from dtgpt.ops.kernels.devices import by_triton, may_fuse, takes_custom_op
from dtgpt.ops.more_activations import FUNCTIONS, SLOPE, gated_reference, relu2_reference


def gelu_kernels():
    from dtgpt.ops.kernels import gelu_kernels  # imported on first use, since it needs Triton

    return gelu_kernels


def swiglu_kernels():
    from dtgpt.ops.kernels import swiglu_kernels  # imported on first use, since it needs Triton

    return swiglu_kernels


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_bias_gelu = torch.library.custom_op("dtgpt::bias_gelu", gelu_reference, mutates_args=(), device_types="cpu")
_bias_gelu.register_kernel("cuda", lambda x, bias: gelu_kernels().bias_gelu_forward(x, bias))
_bias_gelu.register_fake(lambda x, bias: x.new_empty(x.shape))


@torch.library.custom_op("dtgpt::bias_gelu_backward", mutates_args=(), device_types="cpu")
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dbias)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.ops.aten.gelu_backward(dy.to(wide), x.to(wide) + bias, approximate="tanh")
    return dx.to(x.dtype, copy=True), dx.flatten(0, -2).sum(0).to(bias.dtype)


_bias_gelu_backward.register_kernel("cuda", lambda dy, x, bias: gelu_kernels().bias_gelu_backward(dy, x, bias))
_bias_gelu_backward.register_fake(lambda dy, x, bias: (x.new_empty(x.shape), bias.new_empty(bias.shape)))


_bias_gelu.register_autograd(lambda ctx, dy: _bias_gelu_backward(dy, *ctx.saved_tensors), setup_context=_save)

_bias_relu2 = torch.library.custom_op("dtgpt::bias_relu2", relu2_reference, mutates_args=(), device_types="cpu")
_bias_relu2.register_kernel("cuda", lambda x, bias: gelu_kernels().bias_gelu_forward(x, bias, relu2=True))
_bias_relu2.register_fake(lambda x, bias: x.new_empty(x.shape))


@torch.library.custom_op("dtgpt::bias_relu2_backward", mutates_args=(), device_types="cpu")
def _bias_relu2_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dbias)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = dy.to(wide) * 2 * (x.to(wide) + bias).relu()
    return dx.to(x.dtype, copy=True), dx.flatten(0, -2).sum(0).to(bias.dtype)


_bias_relu2_backward.register_kernel(
    "cuda", lambda dy, x, bias: gelu_kernels().bias_gelu_backward(dy, x, bias, relu2=True)
)
_bias_relu2_backward.register_fake(lambda dy, x, bias: (x.new_empty(x.shape), bias.new_empty(bias.shape)))


_bias_relu2.register_autograd(lambda ctx, dy: _bias_relu2_backward(dy, *ctx.saved_tensors), setup_context=_save)

_swiglu = torch.library.custom_op("dtgpt::swiglu", swiglu_reference, mutates_args=(), device_types="cpu")
_swiglu.register_kernel("cuda", lambda x: swiglu_kernels().swiglu_forward(x))
_swiglu.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("dtgpt::swiglu_backward", mutates_args=(), device_types="cpu")
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dx."""
    gate, up = wide_pairs(x)
    dy, gate_sigmoid = dy.to(gate.dtype), gate.sigmoid()
    slope = gate_sigmoid + gate * gate_sigmoid * (1 - gate_sigmoid)
    return torch.stack([dy * up * slope, dy * gate * gate_sigmoid], dim=-1).flatten(-2).to(x.dtype)


swiglu_backward.register_kernel("cuda", lambda dy, x: swiglu_kernels().swiglu_backward(dy, x))
swiglu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))


_swiglu.register_autograd(lambda ctx, dy: swiglu_backward(dy, *ctx.saved_tensors), setup_context=_save)


def _sloped_backward(dy: Tensor, x: Tensor) -> Tensor:
    fraction = (SLOPE * x).sigmoid()
    return dy * fraction * (1 + SLOPE * x * (1 - fraction))


DERIVATIVES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {  # dy and x -> dx, of the functions of `gated`
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu": torch.ops.aten.gelu_backward,
    "relu2": lambda dy, x: dy * 2 * x.relu(),
    "clamped_swiglu": _sloped_backward,
}


def _plain_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Return dx of `gated`, in plain torch."""
    rule, (gate, up) = FUNCTIONS[name], FUNCTIONS[name].inputs(x)
    dy = dy.to(gate.dtype)
    d_gate, d_up = DERIVATIVES[name](dy * up, gate), dy * rule.function(gate)
    if rule.limit is not None:  # what is clamped has no gradient
        gate, up = wide_pairs(x)
        d_gate, d_up = d_gate.masked_fill(gate > rule.limit, 0), d_up.masked_fill(up.abs() > rule.limit, 0)
    return torch.stack([d_gate, d_up], dim=-1).flatten(-2).to(x.dtype)


_gated = torch.library.custom_op("dtgpt::gated", gated_reference, mutates_args=(), device_types="cpu")
_gated.register_fake(lambda x, name: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
_gated_backward = torch.library.custom_op("dtgpt::gated_backward", _plain_backward, mutates_args=(), device_types="cpu")
_gated_backward.register_fake(lambda dy, x, name: x.new_empty(x.shape))


@_gated.register_kernel("cuda")
def _(x, name):
    return swiglu_kernels().swiglu_forward(x, gelu=True) if name == "gelu_tanh" else gated_reference(x, name)


@_gated_backward.register_kernel("cuda")
def _(dy, x, name):
    return swiglu_kernels().swiglu_backward(dy, x, gelu=True) if name == "gelu_tanh" else _plain_backward(dy, x, name)


def _save_gated(ctx, inputs, output) -> None:
    x, ctx.name = inputs
    ctx.save_for_backward(x)


_gated.register_autograd(
    lambda ctx, dy: (_gated_backward(dy, *ctx.saved_tensors, ctx.name), None), setup_context=_save_gated
)


BIAS_GELU = (by_triton(_bias_gelu, may_fuse),)
BIAS_RELU2 = (by_triton(_bias_relu2, lambda x, bias: takes_custom_op(x, has_parameters=True)),)
SWIGLU = (by_triton(_swiglu, lambda x: takes_custom_op(x, has_parameters=False)),)
GATED = (
    by_triton(
        _gated,
        lambda x, name: takes_custom_op(x, has_parameters=False),
        "on GPUs; other functions than gelu_tanh are PyTorch's operations, of which backward keeps x alone",
    ),
)
