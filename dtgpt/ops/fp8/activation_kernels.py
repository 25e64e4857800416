"""Triton kernels of `dtgpt.ops.fp8.activation`. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.fp8.quantize_kernels import (
    CELLS,
    DTYPES,
    Launch,
    empty_orders,
    magnitudes,
    raise_amax,
    store_orders,
    tile_grid,
    to_float8,
)
from dtgpt.ops.norm.column_kernels import sum_partials
from dtgpt.ops.pointwise.gelu_kernels import CUBIC_SLOPE, SLOPE, share
from dtgpt.ops.pointwise.swiglu_kernels import sigmoid

FORWARD = Launch(rows=64, columns=64, warps=4, occupancy=1 << 10, stages=1)
BACKWARD = Launch(rows=64, columns=64, warps=4, occupancy=8, stages=1)


@triton.jit
def load_pairs(x, first, mask_rows, columns, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return gates and factors, fp32 `[ROWS, BLOCK]` each, of rows `first` on of x `[rows, C, 2]`; columns: 2 BLOCK
    of the last two dimensions together."""
    place = tl.arange(0, ROWS)[:, None] * (2 * C) + columns[None, :]
    values = tl.load(x + first * (2 * C) + place, mask_rows[:, None] & (columns < 2 * C)[None, :], 0.0)
    return tl.split(tl.reshape(values.to(tl.float32), (ROWS, BLOCK, 2)))


@triton.jit(do_not_specialize_on_alignment=CELLS)
def forward_kernel(
    x, bias, scale, amax, q, q_t, rows, C: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute gelu_tanh(x + bias) of x `[rows, C]`, without a bias the SwiGLU of x `[rows, C, 2]`, in 8 bits."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    local = tl.arange(0, ROWS)
    largest = tl.zeros([BLOCK], tl.int32)
    if bias is not None:
        shift = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        there = local < rows - first
        mask = there[:, None] & inside[None, :]
        if bias is not None:
            u = tl.load(x + first * C + local[:, None] * C + columns[None, :], mask, 0.0).to(tl.float32) + shift
            y = u * share(u)
        else:
            pairs = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
            gate, up = load_pairs(x, first, there, pairs, C, ROWS, BLOCK)
            y = gate * sigmoid(gate) * up
        y = tl.where(mask, y.to(x.dtype.element_ty).to(tl.float32), 0.0)
        store_orders(q, q_t, to_float8(y, factor, LIMIT, DTYPE), first, rows, columns, C, ROWS)
        if amax is not None:
            largest = tl.maximum(largest, tl.max(magnitudes(y), 0))
    if amax is not None:
        raise_amax(amax, tl.max(largest, 0))


@triton.jit(do_not_specialize_on_alignment=CELLS)
def gelu_backward_kernel(
    dy, x, bias, scale, amax, q, q_t, partials, rows, C: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of gelu_tanh(x + bias) in x in 8 bits, and partial sums of it, from dy, x `[rows, C]`."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    local = tl.arange(0, ROWS)
    place = local[:, None] * C + columns[None, :]
    shift = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    largest = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        mask = (local < rows - first)[:, None] & inside[None, :]
        u = tl.load(x + first * C + place, mask, 0.0).to(tl.float32) + shift
        s = share(u)
        slope = s + u * s * (1.0 - s) * (u * CUBIC_SLOPE * u + SLOPE)
        gradient = tl.load(dy + first * C + place, mask, 0.0).to(tl.float32) * slope
        sums += tl.sum(gradient, 0)
        gradient = gradient.to(x.dtype.element_ty).to(tl.float32)
        store_orders(q, q_t, to_float8(gradient, factor, LIMIT, DTYPE), first, rows, columns, C, ROWS)
        if amax is not None:
            largest = tl.maximum(largest, tl.max(magnitudes(gradient), 0))
    tl.store(partials + tl.program_id(1) * C + columns, sums, inside)
    if amax is not None:
        raise_amax(amax, tl.max(largest, 0))


@triton.jit(do_not_specialize_on_alignment=CELLS)
def swiglu_backward_kernel(
    dy, x, scale, amax, q, q_t, rows, C: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of SwiGLU in x `[rows, C, 2]` in 8 bits, from dy `[rows, C]`."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pairs = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    local = tl.arange(0, ROWS)
    largest = tl.zeros([2 * BLOCK], tl.int32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        there = local < rows - first
        gate, up = load_pairs(x, first, there, pairs, C, ROWS, BLOCK)
        mask = there[:, None] & (columns < C)[None, :]
        gradient = tl.load(dy + first * C + local[:, None] * C + columns[None, :], mask, 0.0).to(tl.float32)
        portion = sigmoid(gate)
        slope = portion + gate * portion * (1.0 - portion)
        both = tl.reshape(tl.join(gradient * up * slope, gradient * gate * portion), (ROWS, 2 * BLOCK))
        both = both.to(x.dtype.element_ty).to(tl.float32)
        store_orders(q, q_t, to_float8(both, factor, LIMIT, DTYPE), first, rows, pairs, 2 * C, ROWS)
        if amax is not None:
            largest = tl.maximum(largest, tl.max(magnitudes(both), 0))
    if amax is not None:
        raise_amax(amax, tl.max(largest, 0))


def _options(dtype: torch.dtype, launch: Launch) -> tuple:
    return torch.finfo(dtype).max, DTYPES[dtype], launch.rows, launch.columns, launch.stages


def forward(
    x: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, columns: bool,
    launch: Launch = FORWARD,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (q `[R, C]`, q_t `[C, R]`, empty without `columns`) of the activation of x `[.., C]` or `[.., 2 C]`."""
    x, width = x.contiguous(), x.shape[-1] // (2 if bias is None else 1)
    height = x.numel() // x.shape[-1]
    q, q_t = empty_orders(x, height, width, dtype, True, columns)
    forward_kernel[tile_grid(height, width, x.device, launch)](
        x, bias, scale, amax, q, q_t if columns else None, height, width, *_options(dtype, launch),
        num_warps=launch.warps,
    )  # fmt: skip
    return q, q_t


def backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype, amax: Tensor | None,
    launch: Launch = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (q, q_t, d_bias) of the gradient in x; without a bias d_bias is empty."""
    dy, x, width = dy.contiguous(), x.contiguous(), dy.shape[-1]
    height = dy.numel() // width
    q, q_t = empty_orders(x, height, x.shape[-1], dtype, True, True)
    grid, options = tile_grid(height, width, x.device, launch), _options(dtype, launch)
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
