"""Activation functions beside those of GPT-2 and LLaMA."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.activations import GatedName, PlainName, bias_gelu, check_even, local_bias, swiglu, wide_pairs
from dtgpt.ops.operation import Operation

SLOPE, LIMIT = 1.702, 7.0  # of clamped_swiglu


def relu2_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 in plain torch: the test oracle."""
    return (x + bias.to(x.dtype)).relu().square()


BIAS_RELU2 = Operation("bias_relu2", relu2_reference, "relu(x + bias)^2")


def bias_relu2(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 `[.., F]` in x's dtype (So et al. 2021, Primer); arguments and errors are those of
    `bias_gelu`."""
    return BIAS_RELU2(x, local_bias(x, bias))


def _of_sum(x: Tensor, bias: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x + local_bias(x, bias).to(x.dtype))


BIASED: dict[PlainName, Callable[[Tensor, Tensor], Tensor]] = {  # of x + bias, without a gate
    "gelu_tanh": bias_gelu,
    "gelu": partial(_of_sum, function=F.gelu),
    "relu2": bias_relu2,
    "relu": partial(_of_sum, function=F.relu),
    "silu": partial(_of_sum, function=F.silu),
}


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


GATED_BY_NAME = Operation("gated", gated_reference, "f(gate) * up")


def gated(x: Tensor, name: str) -> Tensor:
    """Return f(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once; x: `[.., 2 F]` in pairs.

    Raises ValueError for an odd number of columns, KeyError for an unknown name.
    """
    check_even(x)
    return GATED_BY_NAME(x, name)


GATED: dict[GatedName, Callable[[Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": partial(gated, name="gelu_tanh"),
    "gelu": partial(gated, name="gelu"),
    "relu2": partial(gated, name="relu2"),
    "clamped_swiglu": partial(gated, name="clamped_swiglu"),
}
