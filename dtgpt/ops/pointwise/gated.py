"""The functions of a gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): f(gate) * up, f by its name.

`clamped_swiglu` is that of gpt-oss (Agarwal et al. 2025, section 2.2): gate and up are clamped first, f is x
sigmoid(1.702 x), and 1 is added to up.

Gate and up lie interleaved as those of `swiglu`, which is f = silu. Sharding rule: that of
`dtgpt.ops.pointwise.swiglu`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.pointwise.swiglu import check_even, swiglu, wide_pairs
from dtgpt.ops.serve import Operation

GatedName = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu"]
SLOPE, LIMIT = 1.702, 7.0  # of clamped_swiglu


class Gate(NamedTuple):
    """A function f of gates. limit: gates are at most this, ups between -limit and limit, and up + 1 is taken in place
    of up."""

    function: Callable[[Tensor], Tensor]
    limit: float | None = None

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what f takes, and its factor, `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
        gate, up = wide_pairs(x)
        return (gate, up) if self.limit is None else (gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1)


def _sloped(x: Tensor) -> Tensor:
    return x * (SLOPE * x).sigmoid()


FUNCTIONS: Mapping[str, Gate] = {
    "gelu_tanh": Gate(partial(F.gelu, approximate="tanh")),
    "gelu": Gate(F.gelu),
    "relu2": Gate(lambda x: x.relu().square()),
    "clamped_swiglu": Gate(_sloped, LIMIT),
}


def reference(x: Tensor, name: str) -> Tensor:
    """Return what `gated` does, in plain torch: the test oracle."""
    function, (gate, up) = FUNCTIONS[name].function, FUNCTIONS[name].inputs(x)
    return (function(gate) * up).to(x.dtype)


GATED_BY_NAME = Operation("gated", reference, "f(gate) * up")


def gated(x: Tensor, name: str) -> Tensor:
    """Return f(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once; x: as of `swiglu`.

    Raises ValueError for an odd number of columns, KeyError for an unknown name.
    """
    check_even(x)
    return GATED_BY_NAME(x, name)


GATED: dict[GatedName, Callable[[Tensor], Tensor]] = {
    "silu": swiglu, "gelu_tanh": partial(gated, name="gelu_tanh"), "gelu": partial(gated, name="gelu"),
    "relu2": partial(gated, name="relu2"), "clamped_swiglu": partial(gated, name="clamped_swiglu"),
}  # fmt: skip
