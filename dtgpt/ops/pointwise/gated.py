"""The functions of a gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): f(gate) * up, f by its name.

`clamped_swiglu` is that of gpt-oss (Agarwal et al. 2025, section 2.2): gate and up are clamped first, f is x
sigmoid(1.702 x), and 1 is added to up.

Gate and up lie interleaved as those of `swiglu`, which is f = silu. Reference: `reference`. Fast path for gelu_tanh:
the Triton kernels of `swiglu`, fp32 inside; others run PyTorch's operations on a GPU, too. Forward saves x alone.
Sharding rule: that of `dtgpt.ops.pointwise.swiglu`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.kernels.devices import takes_custom_op
from dtgpt.ops.pointwise.swiglu import kernels, swiglu, wide_pairs

GatedName = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu"]
SLOPE, LIMIT = 1.702, 7.0  # of clamped_swiglu


class Gate(NamedTuple):
    """A function f of gates. limit: gates are at most this, ups between -limit and limit, and up + 1 is taken in place
    of up."""

    function: Callable[[Tensor], Tensor]
    differentiate: Callable[[Tensor, Tensor], Tensor]  # dy and x -> dx
    limit: float | None = None

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what f takes, and its factor, `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
        gate, up = wide_pairs(x)
        return (gate, up) if self.limit is None else (gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1)


def _sloped(x: Tensor) -> Tensor:
    return x * (SLOPE * x).sigmoid()


def _sloped_backward(dy: Tensor, x: Tensor) -> Tensor:
    fraction = (SLOPE * x).sigmoid()
    return dy * fraction * (1 + SLOPE * x * (1 - fraction))


FUNCTIONS: Mapping[str, Gate] = {
    "gelu_tanh": Gate(
        partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    "gelu": Gate(F.gelu, torch.ops.aten.gelu_backward),
    "relu2": Gate(lambda x: x.relu().square(), lambda dy, x: dy * 2 * x.relu()),
    "clamped_swiglu": Gate(_sloped, _sloped_backward, LIMIT),
}  # fmt: skip


def reference(x: Tensor, name: str) -> Tensor:
    """Return what `gated` does, in plain torch: the test oracle."""
    function, (gate, up) = FUNCTIONS[name].function, FUNCTIONS[name].inputs(x)
    return (function(gate) * up).to(x.dtype)


def gated(x: Tensor, name: str) -> Tensor:
    """Return f(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once; x: as of `swiglu`.

    Raises ValueError for an odd number of columns, KeyError for an unknown name.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; each gate needs its factor")
    return _gated(x, name) if takes_custom_op(x, has_parameters=False) else reference(x, name)


GATED: dict[GatedName, Callable[[Tensor], Tensor]] = {
    "silu": swiglu, "gelu_tanh": partial(gated, name="gelu_tanh"), "gelu": partial(gated, name="gelu"),
    "relu2": partial(gated, name="relu2"), "clamped_swiglu": partial(gated, name="clamped_swiglu"),
}  # fmt: skip


def reference_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Return dx of `gated`, in plain torch."""
    rule, (gate, up) = FUNCTIONS[name], FUNCTIONS[name].inputs(x)
    dy = dy.to(gate.dtype)
    d_gate, d_up = rule.differentiate(dy * up, gate), dy * rule.function(gate)
    if rule.limit is not None:  # what is clamped has no gradient
        gate, up = wide_pairs(x)
        d_gate, d_up = d_gate.masked_fill(gate > rule.limit, 0), d_up.masked_fill(up.abs() > rule.limit, 0)
    return torch.stack([d_gate, d_up], dim=-1).flatten(-2).to(x.dtype)


_gated = torch.library.custom_op("dtgpt::gated", reference, mutates_args=(), device_types="cpu")
_gated.register_fake(lambda x, name: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
_gated_backward = torch.library.custom_op(
    "dtgpt::gated_backward", reference_backward, mutates_args=(), device_types="cpu"
)
_gated_backward.register_fake(lambda dy, x, name: x.new_empty(x.shape))


@_gated.register_kernel("cuda")
def _(x, name):
    return kernels().swiglu_forward(x, gelu=True) if name == "gelu_tanh" else reference(x, name)


@_gated_backward.register_kernel("cuda")
def _(dy, x, name):
    return kernels().swiglu_backward(dy, x, gelu=True) if name == "gelu_tanh" else reference_backward(dy, x, name)


def _save(ctx, inputs, output) -> None:
    x, ctx.name = inputs
    ctx.save_for_backward(x)


_gated.register_autograd(lambda ctx, dy: (_gated_backward(dy, *ctx.saved_tensors, ctx.name), None), setup_context=_save)
