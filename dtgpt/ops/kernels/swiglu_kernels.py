"""Triton kernels of `dtgpt.ops.activations`, and of `gated` with GELU by tanh. Needs Triton.

Pairs of gate and up are independent of rows, so that a tensor is a flat sequence of them.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.gelu_kernels import cdf
from dtgpt.ops.kernels.gelu_kernels import slope as gelu_slope
from dtgpt.ops.kernels.machine import power_of_two, reciprocal


class SwigluLaunch(NamedTuple):
    """How a kernel is distributed over the device."""

    pairs: int  # of a program
    warps: int


FORWARD = SwigluLaunch(pairs=1024, warps=4)
BACKWARD = SwigluLaunch(pairs=1024, warps=8)

RATE = tl.constexpr(-1 / math.log(2))
# In a product with a tensor this constant is the right operand, as the interpreter of Triton 3.8 needs.


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + power_of_two(x * RATE))


@triton.jit
def load_pairs(x, first, pairs, BLOCK: tl.constexpr):
    """Return BLOCK gates and their factors from pair `first` on, in fp32."""
    places = tl.arange(0, 2 * BLOCK)
    values = tl.load(x + 2 * first + places, places < 2 * (pairs - first), 0.0).to(tl.float32)
    return tl.split(tl.reshape(values, (BLOCK, 2)))


@triton.jit
def swiglu_forward_kernel(x, y, pairs, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Compute y `[pairs]` from x `[pairs, 2]`; GELU: by gelu_tanh in place of silu."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    gate, up = load_pairs(x, first, pairs, BLOCK)
    places = tl.arange(0, BLOCK)
    if GELU:
        tl.store(y + first + places, gate * cdf(gate) * up, places < pairs - first)
    else:
        tl.store(y + first + places, gate * sigmoid(gate) * up, places < pairs - first)


@triton.jit
def swiglu_backward_kernel(dy, x, dx, pairs, last, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Compute dx `[pairs, 2]` from dy `[pairs]` and x `[pairs, 2]`, of the first rows of F pairs, as many as `last`
    says; None: of all."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if last is not None:
        pairs = tl.minimum(pairs, tl.load(last).to(tl.int64) * F)
    gate, up = load_pairs(x, first, pairs, BLOCK)
    places = tl.arange(0, BLOCK)
    gradient = tl.load(dy + first + places, places < pairs - first, 0.0).to(tl.float32)
    if GELU:
        fraction = cdf(gate)
        slope = gelu_slope(gate)
    else:
        fraction = sigmoid(gate)
        slope = fraction + gate * fraction * (1.0 - fraction)
    both = tl.reshape(tl.join(gradient * up * slope, gradient * gate * fraction), (2 * BLOCK,))
    places = tl.arange(0, 2 * BLOCK)
    tl.store(dx + 2 * first + places, both, places < 2 * (pairs - first))


def swiglu_forward(x: Tensor, launch: SwigluLaunch = FORWARD, gelu: bool = False) -> Tensor:
    """Return silu(gate) * up `[.., F]` for x `[.., 2 F]`; gelu: gelu_tanh(gate) * up."""
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(y.numel(), launch.pairs),)
    swiglu_forward_kernel[grid](x, y, y.numel(), launch.pairs, gelu, num_warps=launch.warps)
    return y


def swiglu_backward(
    dy: Tensor, x: Tensor, launch: SwigluLaunch = BACKWARD, gelu: bool = False, ends: Tensor | None = None
) -> Tensor:
    """Return dx `[.., 2 F]` of what `swiglu_forward` returns. ends: int32, the last of which says how many rows count;
    what is behind them may be anything."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    grid = (triton.cdiv(dy.numel(), launch.pairs),)
    last, width = None if ends is None else ends[-1:], dy.shape[-1]
    swiglu_backward_kernel[grid](dy, x, dx, dy.numel(), last, width, launch.pairs, gelu, num_warps=launch.warps)
    return dx
