"""The activations that fused kernels compute, in fp8 and in decode steps."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from dtgpt.ops.activations import bias_gelu, swiglu

Name = Literal["gelu", "swiglu"]  # that fused kernels have


# The functions that fused kernels compute, in fp8 and in decode steps: (function, whether with a bias) -> name. Modules
# compute any other one, with the same result under every plan.
FUSED: dict[tuple[Callable[..., Tensor], bool], Name] = {(bias_gelu, True): "gelu", (swiglu, False): "swiglu"}


def fused_name(function: Callable[..., Tensor], has_bias: bool) -> Name | None:
    """Return the name of the activation by which kernels know `function`, called with a bias or without; None where
    they do not know it."""
    return FUSED.get((function, has_bias))
