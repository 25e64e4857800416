"""Activation functions of an MLP: of a sum with its bias (GPT-2), or of a gate that multiplies another half (LLaMA).

Recipes choose them by name, so that an architecture is not a class for each function. Those of GPT-2 and LLaMA,
tanh-GELU and SwiGLU, are also known to kernels that compute them together with the matrices beside them; other
functions are of a capability.

Gate and up of a gated MLP lie interleaved along the last dimension, `[F, 2]`, so that any contiguous cut between pairs
keeps each gate with its factor. Sharding rule: any dimension may be sharded, that of pairs between pairs. A shard of
the last dimension takes its shard of the bias; a shard of rows gives a partial sum of the bias's gradient."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.operation import Operation
from dtgpt.util import seams
from dtgpt.util.torch_private import is_dtensor

PlainName = Literal["gelu_tanh", "gelu", "relu2", "relu", "silu"]  # of a sum with a bias
GatedName = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu"]  # of a gate


def gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) in plain torch: the test oracle."""
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


BIAS_GELU = Operation("bias_gelu", gelu_reference, "gelu_tanh(x + bias)")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) `[.., F]` in x's dtype, for x `[.., F]` and bias `[F]` (Hendrycks and Gimpel 2016,
    section 2: the approximation by tanh).

    A bias that is a DTensor is replaced by its local shard, or gathered where x has all columns. Raises ValueError
    where bias and x do not fit.
    """
    return BIAS_GELU(x, local_bias(x, bias))


def local_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return the bias as a plain tensor that fits x. Raises ValueError."""
    if is_dtensor(bias):
        bias = bias.full_tensor() if len(bias) == x.shape[-1] else bias.to_local()
    if bias.shape != x.shape[-1:]:  # the kernels do not check
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit x of shape {tuple(x.shape)}")
    return bias


def wide_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up


def swiglu_reference(x: Tensor) -> Tensor:
    """Return silu(gate) * up in plain torch: the test oracle."""
    gate, up = wide_pairs(x)
    return (F.silu(gate) * up).to(x.dtype)


SWIGLU = Operation("swiglu", swiglu_reference, "silu(gate) * up")


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once (Shazeer 2020, "GLU
    Variants Improve Transformer").

    x: `[.., 2 F]`, whose columns are gate 0, up 0, gate 1, up 1, ... Raises ValueError where their number is odd.
    """
    check_even(x)
    return SWIGLU(x)


def check_even(x: Tensor) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; each gate needs its factor")


OWN: Mapping[tuple[str, bool], Callable[..., Tensor]] = {("gelu_tanh", False): bias_gelu, ("silu", True): swiglu}


def activation(name: str, gated: bool) -> Callable[..., Tensor]:
    """Return the function of this name, of a gate and its factor or of a sum with a bias. Raise UserError where it is
    one that no capability here has."""
    missing = f"activation={name} is of a capability that is not here; use another one"
    return OWN.get((name, gated)) or seams.first("activations", missing)(name, gated)
