"""Triton kernels of `dtgpt.ops.activations` and `relu2`. Needs Triton.

Tiles are taken from the last rows to the first, as in `dtgpt.ops.kernels.norm_kernels`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.column_kernels import ColumnLaunch, column_grid, sum_partials
from dtgpt.ops.kernels.machine import power_of_two, reciprocal

FORWARD = ColumnLaunch(rows=4, width=8, occupancy=1 << 20, stages=1)  # a program for each tile
BACKWARD = ColumnLaunch(rows=2, width=8, occupancy=24, stages=2)

# (1 + tanh z) / 2 = 1 / (1 + 2^(-2 z / ln 2)): one exponential, and accurate where 1 + tanh z cancels.
# z = sqrt(2 / pi) (u + 0.044715 u^3).
RATE = tl.constexpr(-2 * math.sqrt(2 / math.pi) / math.log(2))
CUBIC_RATE = tl.constexpr(-2 * math.sqrt(2 / math.pi) / math.log(2) * 0.044715)
SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC_SLOPE = tl.constexpr(3 * 2 * math.sqrt(2 / math.pi) * 0.044715)
# In products with tensors these constants are the right operand, as the interpreter of Triton 3.8 needs.


@triton.jit
def cdf(u):
    """Return gelu_tanh(u) / u."""
    return reciprocal(1.0 + power_of_two(u * (u * u * CUBIC_RATE + RATE)))


@triton.jit
def slope(u):
    """Return the derivative of gelu_tanh at u."""
    s = cdf(u)
    return s + (s - s * s) * (u * (u * u * CUBIC_SLOPE + SLOPE))


@triton.jit(do_not_specialize=["rows"])
def bias_gelu_forward_kernel(
    x,
    bias,
    y,
    rows,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RELU2: tl.constexpr,
):
    """Compute y `[rows, F]` from x `[rows, F]` and bias `[F]`."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    shift = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    local = tl.arange(0, ROWS)
    place = local[:, None] * F + columns[None, :]
    tiles = tl.cdiv(rows, ROWS)
    for before in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tiles - 1 - before, tl.int64) * ROWS
        mask = (local < rows - first)[:, None] & inside[None, :]
        u = tl.load(x + first * F + place, mask, 0.0).to(tl.float32) + shift
        if RELU2:
            u = tl.maximum(u, 0.0)
            tl.store(y + first * F + place, u * u, mask)
        else:
            tl.store(y + first * F + place, u * cdf(u), mask)


@triton.jit(do_not_specialize=["rows"])
def bias_gelu_backward_kernel(
    dy,
    x,
    bias,
    dx,
    partials,
    rows,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RELU2: tl.constexpr,
):
    """Compute dx `[rows, F]`, and partials of dbias `[programs along the rows, F]`, from dy and x `[rows, F]`."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    shift = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    local = tl.arange(0, ROWS)
    place = local[:, None] * F + columns[None, :]
    sums = tl.zeros([BLOCK], tl.float32)
    tiles = tl.cdiv(rows, ROWS)
    for before in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tiles - 1 - before, tl.int64) * ROWS
        mask = (local < rows - first)[:, None] & inside[None, :]
        u = tl.load(x + first * F + place, mask, 0.0).to(tl.float32) + shift
        gradient = tl.load(dy + first * F + place, mask, 0.0).to(tl.float32)
        if RELU2:
            gradient *= tl.maximum(u, 0.0) * 2.0
        else:
            gradient *= slope(u)
        tl.store(dx + first * F + place, gradient, mask)
        sums += tl.sum(gradient, 0)
    tl.store(partials + tl.program_id(1) * F + columns, sums, inside)


def bias_gelu_forward(x: Tensor, bias: Tensor, launch: ColumnLaunch = FORWARD, relu2: bool = False) -> Tensor:
    """Return gelu_tanh(x + bias) `[.., F]` for x `[.., F]` and bias `[F]`; relu2: relu(x + bias)^2."""
    x, columns = x.contiguous(), x.shape[-1]
    rows, y = x.numel() // columns, torch.empty_like(x)
    grid, tile, block, warps = column_grid(rows, columns, x.device, launch)
    bias_gelu_forward_kernel[grid](x, bias, y, rows, columns, tile, block, launch.stages, relu2, num_warps=warps)
    return y


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor, launch: ColumnLaunch = BACKWARD, relu2: bool = False, blocks: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (dx, dbias) of what `bias_gelu_forward` returns. blocks: see `column_kernels.column_grid`."""
    dy, x, columns = dy.contiguous(), x.contiguous(), x.shape[-1]
    rows, dx, dbias = x.numel() // columns, torch.empty_like(x), torch.empty_like(bias)
    grid, tile, block, warps = column_grid(rows, columns, x.device, launch, blocks)
    partials = torch.empty(1, grid[1], columns, dtype=torch.float32, device=x.device)
    bias_gelu_backward_kernel[grid](
        dy, x, bias, dx, partials, rows, columns, tile, block, launch.stages, relu2, num_warps=warps
    )
    sum_partials(partials, dbias)
    return dx, dbias
