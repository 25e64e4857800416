"""Triton kernels of `dtgpt.ops.fp8.activation`, by the tiles of `quantize_kernels`. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.column_kernels import sum_partials
from dtgpt.ops.kernels.gelu_kernels import cdf, slope
from dtgpt.ops.kernels.machine import rounded
from dtgpt.ops.kernels.quantize_kernels import (
    CELLS,
    QuantizeLaunch,
    empty_orders,
    largest_of,
    raise_amax,
    store_orders,
    tile_grid,
    tile_options,
)
from dtgpt.ops.kernels.swiglu_kernels import sigmoid

GELU_FORWARD = QuantizeLaunch(rows=64, columns=128, warps=8, occupancy=4, stages=3)
GELU_BACKWARD = QuantizeLaunch(rows=64, columns=64, warps=4, occupancy=8, stages=2)
SWIGLU_FORWARD = QuantizeLaunch(rows=128, columns=64, warps=8, occupancy=4, stages=1)
SWIGLU_BACKWARD = QuantizeLaunch(rows=128, columns=64, warps=4, occupancy=4, stages=2)


@triton.jit
def load_pairs(places, mask, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return gates and factors, fp32 `[GROUPS, BLOCK]` each, of pairs in neighbouring columns."""
    return tl.split(tl.reshape(tl.load(places, mask, 0.0).to(tl.float32), (GROUPS, BLOCK, 2)))


@triton.jit
def gelu_of(places, mask, shift):
    """Return gelu_tanh of what is loaded plus `shift`; 0 outside of the mask."""
    u = tl.load(places, mask, 0.0).to(tl.float32) + shift
    return tl.where(mask, u * cdf(u), 0.0)


@triton.jit
def gelu_gradient(dy, places, mask, shift):
    """Return the gradient of `gelu_of`'s loaded input."""
    u = tl.load(places, mask, 0.0).to(tl.float32) + shift
    return tl.load(dy, mask, 0.0).to(tl.float32) * slope(u)


@triton.jit
def swiglu_of(places, mask, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the SwiGLU of pairs."""
    gate, up = load_pairs(places, mask, GROUPS, BLOCK)
    return gate * sigmoid(gate) * up


@triton.jit
def swiglu_gradient(dy, mask, places, pair_mask, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the gradients of pairs, `[GROUPS, 2 BLOCK]`."""
    gate, up = load_pairs(places, pair_mask, GROUPS, BLOCK)
    gradient = tl.load(dy, mask, 0.0).to(tl.float32)
    portion = sigmoid(gate)
    rate = portion + gate * portion * (1.0 - portion)
    return tl.reshape(tl.join(gradient * up * rate, gradient * gate * portion), (GROUPS, 2 * BLOCK))


@triton.jit(do_not_specialize_on_alignment=CELLS)
def activation_kernel(
    x, bias, scale, amax, q, q_t, rows, C: tl.constexpr,
    LIMIT: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute gelu_tanh(x + bias) of x `[rows, C]`, without a bias the SwiGLU of x `[rows, C, 2]`, in 8 bits."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.arange(0, GROUPS)
    largest = tl.zeros([GROUPS, BLOCK], tl.float32)
    if bias is not None:
        shift = tl.load(bias + columns, columns < C, 0.0).to(tl.float32)[None, :]
        place = x + (4 * C) * group[:, None] + columns[None, :]
    else:
        pairs = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        place = x + (8 * C) * group[:, None] + pairs[None, :]
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, 4 * GROUPS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * (4 * GROUPS)
        there = group < (rows - first) // 4
        mask = there[:, None] & (columns < C)[None, :]
        if bias is not None:
            a = gelu_of(place + first * C, mask, shift)
            b = gelu_of(place + first * C + C, mask, shift)
            c = gelu_of(place + first * C + 2 * C, mask, shift)
            d = gelu_of(place + first * C + 3 * C, mask, shift)
        else:
            pair_mask = there[:, None] & (pairs < 2 * C)[None, :]
            a = swiglu_of(place + first * (2 * C), pair_mask, GROUPS, BLOCK)
            b = swiglu_of(place + first * (2 * C) + 2 * C, pair_mask, GROUPS, BLOCK)
            c = swiglu_of(place + first * (2 * C) + 4 * C, pair_mask, GROUPS, BLOCK)
            d = swiglu_of(place + first * (2 * C) + 6 * C, pair_mask, GROUPS, BLOCK)
        a, b = rounded(a, b)
        c, d = rounded(c, d)
        store_orders(q, q_t, a, b, c, d, factor, first, rows, columns, mask, C, LIMIT, DTYPE, GROUPS)
        if amax is not None:
            largest = largest_of(largest, a, b, c, d)
    if amax is not None:
        raise_amax(amax, largest)


@triton.jit(do_not_specialize_on_alignment=CELLS)
def gelu_backward_kernel(
    dy, x, bias, scale, amax, q, q_t, partials, rows, C: tl.constexpr,
    LIMIT: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of gelu_tanh(x + bias) in x in 8 bits, and partial sums of it, from dy, x `[rows, C]`."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    group = tl.arange(0, GROUPS)
    place = (4 * C) * group[:, None] + columns[None, :]
    shift = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    largest = tl.zeros([GROUPS, BLOCK], tl.float32)
    sums = tl.zeros([GROUPS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, 4 * GROUPS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * (4 * GROUPS)
        mask = (group < (rows - first) // 4)[:, None] & inside[None, :]
        given, gradient = x + first * C + place, dy + first * C + place
        a = gelu_gradient(gradient, given, mask, shift)
        b = gelu_gradient(gradient + C, given + C, mask, shift)
        c = gelu_gradient(gradient + 2 * C, given + 2 * C, mask, shift)
        d = gelu_gradient(gradient + 3 * C, given + 3 * C, mask, shift)
        sums += (a + b) + (c + d)
        a, b = rounded(a, b)
        c, d = rounded(c, d)
        store_orders(q, q_t, a, b, c, d, factor, first, rows, columns, mask, C, LIMIT, DTYPE, GROUPS)
        if amax is not None:
            largest = largest_of(largest, a, b, c, d)
    tl.store(partials + tl.program_id(1) * C + columns, tl.sum(sums, 0), inside)
    if amax is not None:
        raise_amax(amax, largest)


@triton.jit(do_not_specialize_on_alignment=CELLS)
def swiglu_backward_kernel(
    dy, x, scale, amax, q, q_t, rows, C: tl.constexpr,
    LIMIT: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of SwiGLU in x `[rows, C, 2]` in 8 bits, from dy `[rows, C]`."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pairs = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    group = tl.arange(0, GROUPS)
    place = (4 * C) * group[:, None] + columns[None, :]
    pair_place = (8 * C) * group[:, None] + pairs[None, :]
    largest = tl.zeros([GROUPS, 2 * BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, 4 * GROUPS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * (4 * GROUPS)
        there = (group < (rows - first) // 4)[:, None]
        mask, pair_mask = there & (columns < C)[None, :], there & (pairs < 2 * C)[None, :]
        given, gradient = x + first * (2 * C) + pair_place, dy + first * C + place
        a = swiglu_gradient(gradient, mask, given, pair_mask, GROUPS, BLOCK)
        b = swiglu_gradient(gradient + C, mask, given + 2 * C, pair_mask, GROUPS, BLOCK)
        c = swiglu_gradient(gradient + 2 * C, mask, given + 4 * C, pair_mask, GROUPS, BLOCK)
        d = swiglu_gradient(gradient + 3 * C, mask, given + 6 * C, pair_mask, GROUPS, BLOCK)
        a, b = rounded(a, b)
        c, d = rounded(c, d)
        store_orders(q, q_t, a, b, c, d, factor, first, rows, pairs, pair_mask, 2 * C, LIMIT, DTYPE, GROUPS)
        if amax is not None:
            largest = largest_of(largest, a, b, c, d)
    if amax is not None:
        raise_amax(amax, largest)


def forward(
    x: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, columns: bool,
    launch: QuantizeLaunch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (q `[R, C]`, q_t `[C, R]`, empty without `columns`) of the activation of x `[.., C]` or `[.., 2 C]`."""
    launch = launch or (SWIGLU_FORWARD if bias is None else GELU_FORWARD)
    x, width = x.contiguous(), x.shape[-1] // (2 if bias is None else 1)
    height = x.numel() // x.shape[-1]
    q, q_t = empty_orders(x, height, width, dtype, True, columns)
    activation_kernel[tile_grid(height, width, x.device, launch)](
        x, bias, scale, amax, q, q_t if columns else None, height, width, *tile_options(dtype, launch),
        num_warps=launch.warps,
    )  # fmt: skip
    return q, q_t


def backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype, amax: Tensor | None,
    launch: QuantizeLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (q, q_t, d_bias) of the gradient in x; without a bias d_bias is empty."""
    launch = launch or (SWIGLU_BACKWARD if bias is None else GELU_BACKWARD)
    dy, x, width = dy.contiguous(), x.contiguous(), dy.shape[-1]
    height = dy.numel() // width
    q, q_t = empty_orders(x, height, x.shape[-1], dtype, True, True)
    grid, options = tile_grid(height, width, x.device, launch), tile_options(dtype, launch)
    if bias is None:
        swiglu_backward_kernel[grid](dy, x, scale, amax, q, q_t, height, width, *options, num_warps=launch.warps)
        return q, q_t, x.new_empty(0)
    partials = torch.empty(1, grid[1], width, dtype=torch.float32, device=x.device)
    gelu_backward_kernel[grid](
        dy, x, bias, scale, amax, q, q_t, partials, height, width, *options, num_warps=launch.warps
    )
    d_bias = torch.empty_like(bias)
    sum_partials(partials, d_bias)
    return q, q_t, d_bias
