"""The activation functions of an MLP that fused kernels compute, in fp8 and in decode steps. Modules compute any other
one, with the same result under every plan."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.pointwise.gelu import bias_gelu, local_bias
from dtgpt.ops.pointwise.relu2 import bias_relu2
from dtgpt.ops.pointwise.swiglu import swiglu

Name = Literal["gelu", "swiglu"]
PlainName = Literal["gelu_tanh", "gelu", "relu2", "relu", "silu"]


class Activation(NamedTuple):
    """A function of `[.., F]`, by the name that kernels have for it."""

    name: Name
    function: Callable[..., Tensor]
    takes_bias: bool  # [F], as its second argument


FUSED = (Activation("gelu", bias_gelu, True), Activation("swiglu", swiglu, False))  # gelu: the tanh approximation


def _of_sum(x: Tensor, bias: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x + local_bias(x, bias).to(x.dtype))


BIASED: dict[PlainName, Callable[[Tensor, Tensor], Tensor]] = {  # of x + bias, without a gate
    "gelu_tanh": bias_gelu, "gelu": partial(_of_sum, function=F.gelu), "relu2": bias_relu2,
    "relu": partial(_of_sum, function=F.relu), "silu": partial(_of_sum, function=F.silu),
}  # fmt: skip


def fused_name(function: Callable[..., Tensor], has_bias: bool) -> Name | None:
    """Return the name of the activation by which kernels know `function`, called with a bias or without; None where
    they do not know it."""
    return next((each.name for each in FUSED if each.function is function and each.takes_bias == has_bias), None)


def check_bias(name: str, has_bias: bool) -> None:
    """Raise ValueError where no fused kernel computes the activation `name`, with a bias or without."""
    if not any((each.name, each.takes_bias) == (name, has_bias) for each in FUSED):
        raise ValueError(
            f"no fused kernel computes the activation {name} {'with' if has_bias else 'without'} a bias; compute it "
            "between the two matrices"
        )
