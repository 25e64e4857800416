"""Activation functions of an MLP: of a sum with its bias (GPT-2), or of a gate that multiplies another half (LLaMA).

Recipes choose them by name, so that an architecture is not a class for each function. Those of GPT-2 and LLaMA,
tanh-GELU and SwiGLU, are also known to kernels that compute them together with the matrices beside them: see
`fused_name`.

Gate and up of a gated MLP lie interleaved along the last dimension, `[F, 2]`, so that any contiguous cut between pairs
keeps each gate with its factor. Sharding rule: any dimension may be sharded, that of pairs between pairs. A shard of
the last dimension takes its shard of the bias; a shard of rows gives a partial sum of the bias's gradient."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.serve import Operation
from dtgpt.util.torch_private import is_dtensor

PlainName = Literal["gelu_tanh", "gelu", "relu2", "relu", "silu"]  # of a sum with a bias
GatedName = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu"]  # of a gate
SLOPE, LIMIT = 1.702, 7.0  # of clamped_swiglu


def gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) in plain torch: the test oracle."""
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


def relu2_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 in plain torch: the test oracle."""
    return (x + bias.to(x.dtype)).relu().square()


BIAS_GELU = Operation("bias_gelu", gelu_reference, "gelu_tanh(x + bias)")
BIAS_RELU2 = Operation("bias_relu2", relu2_reference, "relu(x + bias)^2")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) `[.., F]` in x's dtype, for x `[.., F]` and bias `[F]` (Hendrycks and Gimpel 2016,
    section 2: the approximation by tanh).

    A bias that is a DTensor is replaced by its local shard, or gathered where x has all columns. Raises ValueError
    where bias and x do not fit.
    """
    return BIAS_GELU(x, local_bias(x, bias))


def bias_relu2(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 `[.., F]` in x's dtype (So et al. 2021, Primer); arguments and errors are those of
    `bias_gelu`."""
    return BIAS_RELU2(x, local_bias(x, bias))


def local_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return the bias as a plain tensor that fits x. Raises ValueError."""
    if is_dtensor(bias):
        bias = bias.full_tensor() if len(bias) == x.shape[-1] else bias.to_local()
    if bias.shape != x.shape[-1:]:  # the kernels do not check
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit x of shape {tuple(x.shape)}")
    return bias


def _of_sum(x: Tensor, bias: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x + local_bias(x, bias).to(x.dtype))


BIASED: dict[PlainName, Callable[[Tensor, Tensor], Tensor]] = {  # of x + bias, without a gate
    "gelu_tanh": bias_gelu,
    "gelu": partial(_of_sum, function=F.gelu),
    "relu2": bias_relu2,
    "relu": partial(_of_sum, function=F.relu),
    "silu": partial(_of_sum, function=F.silu),
}


def wide_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up


class Gate(NamedTuple):
    """A function f of gates. limit: gates are at most this, ups between -limit and limit, and up + 1 is taken in place
    of up."""

    function: Callable[[Tensor], Tensor]
    limit: float | None = None

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what f takes, and its factor, `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
        gate, up = wide_pairs(x)
        return (gate, up) if self.limit is None else (gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1)


FUNCTIONS: Mapping[str, Gate] = {  # but silu's, which `swiglu` is
    "gelu_tanh": Gate(partial(F.gelu, approximate="tanh")),
    "gelu": Gate(F.gelu),
    "relu2": Gate(lambda x: x.relu().square()),
    "clamped_swiglu": Gate(lambda x: x * (SLOPE * x).sigmoid(), LIMIT),  # gpt-oss (Agarwal et al. 2025, section 2.2)
}


def gated_reference(x: Tensor, name: str) -> Tensor:
    """Return f(gate) * up, f by its name, in plain torch: the test oracle."""
    function, (gate, up) = FUNCTIONS[name].function, FUNCTIONS[name].inputs(x)
    return (function(gate) * up).to(x.dtype)


def swiglu_reference(x: Tensor) -> Tensor:
    """Return silu(gate) * up in plain torch: the test oracle."""
    gate, up = wide_pairs(x)
    return (F.silu(gate) * up).to(x.dtype)


SWIGLU = Operation("swiglu", swiglu_reference, "silu(gate) * up")
GATED_BY_NAME = Operation("gated", gated_reference, "f(gate) * up")


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once (Shazeer 2020, "GLU
    Variants Improve Transformer").

    x: `[.., 2 F]`, whose columns are gate 0, up 0, gate 1, up 1, ... Raises ValueError where their number is odd.
    """
    _check_even(x)
    return SWIGLU(x)


def gated(x: Tensor, name: str) -> Tensor:
    """Return f(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once; x: `[.., 2 F]` in pairs.

    Raises ValueError for an odd number of columns, KeyError for an unknown name.
    """
    _check_even(x)
    return GATED_BY_NAME(x, name)


def _check_even(x: Tensor) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; each gate needs its factor")


GATED: dict[GatedName, Callable[[Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": partial(gated, name="gelu_tanh"),
    "gelu": partial(gated, name="gelu"),
    "relu2": partial(gated, name="relu2"),
    "clamped_swiglu": partial(gated, name="clamped_swiglu"),
}
