"""Triton kernels of `dtgpt.ops.fp8.quantize`, and what kernels share that quantise their results. Needs Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.fast import multiprocessors
from dtgpt.ops.norm.column_kernels import sum_partials


class Launch(NamedTuple):
    """How a kernel over tiles is distributed over the device."""

    rows: int  # of a tile
    columns: int
    warps: int  # of a program
    occupancy: int  # programs per multiprocessor; more than fit make a second wave
    stages: int  # of the software pipeline: tiles that a program prefetches


ONE_ORDER = Launch(rows=32, columns=128, warps=4, occupancy=1 << 10, stages=1)
BOTH_ORDERS = Launch(rows=64, columns=64, warps=4, occupancy=1 << 10, stages=1)
WITH_SUMS = Launch(rows=64, columns=64, warps=4, occupancy=8, stages=1)
CELLS = ["scale", "amax"]  # elements of vectors, at any address: one binary serves all


@triton.jit
def to_float8(values, scale, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Return fp32 values * scale in an 8-bit format: finite values saturate, others become NaN."""
    scaled = tl.minimum(tl.maximum(values * scale, -LIMIT), LIMIT)
    return tl.where(tl.abs(values) < float("inf"), scaled, float("nan")).to(DTYPE)


@triton.jit
def magnitudes(values):
    """Return |values| of fp32 as integers of the same order, in which NaN is largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_amax(amax, largest):
    """Raise the cell to a largest magnitude, an integer of `magnitudes`. The order of programs does not matter."""
    cell = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    if largest > tl.load(cell):  # most programs spare the atomic operation; an outdated value only costs one
        tl.atomic_max(cell, largest, sem="relaxed")


@triton.jit
def store_orders(q, q_t, values, first, row_count, columns, C: tl.constexpr, ROWS: tl.constexpr):
    """Store a tile of 8-bit values, rows `first` on, to q `[rows, C]` and q_t `[C, rows]`; those that are None are
    left out."""
    local = tl.arange(0, ROWS)
    there, inside = local < row_count - first, columns < C
    if q is not None:
        tl.store(q + first * C + local[:, None] * C + columns[None, :], values, there[:, None] & inside[None, :])
    if q_t is not None:
        place = columns.to(tl.int64)[:, None] * row_count + first + local[None, :]
        tl.store(q_t + place, tl.trans(values), inside[:, None] & there[None, :])


@triton.jit(do_not_specialize_on_alignment=CELLS)
def quantize_kernel(
    x, scale, amax, q, q_t, partials, rows, C: tl.constexpr,
    LIMIT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Quantise x `[rows, C]` to q and q_t, raise amax, and sum x to partials `[programs along the rows, C]`; those
    that are None are left out."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    local = tl.arange(0, ROWS)
    place = local[:, None] * C + columns[None, :]
    largest = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        mask = (local < rows - first)[:, None] & inside[None, :]
        values = tl.load(x + first * C + place, mask, 0.0).to(tl.float32)
        store_orders(q, q_t, to_float8(values, factor, LIMIT, DTYPE), first, rows, columns, C, ROWS)
        if amax is not None:
            largest = tl.maximum(largest, tl.max(magnitudes(values), 0))
        if partials is not None:
            sums += tl.sum(values, 0)
    if amax is not None:
        raise_amax(amax, tl.max(largest, 0))
    if partials is not None:
        tl.store(partials + tl.program_id(1) * C + columns, sums, inside)


DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def tile_grid(rows: int, columns: int, device: torch.device, launch: Launch) -> tuple[int, int]:
    """Return (blocks of columns, programs along the rows)."""
    blocks = triton.cdiv(columns, launch.columns)
    programs = multiprocessors(device) * launch.occupancy // blocks
    return blocks, max(min(programs, triton.cdiv(rows, launch.rows)), 1)


def empty_orders(x: Tensor, rows: int, columns: int, dtype: torch.dtype, q: bool, q_t: bool) -> tuple[Tensor, Tensor]:
    """Return memory for q `[rows, columns]` and q_t `[columns, rows]`, empty where one is not wanted."""
    return x.new_empty((rows, columns) if q else 0, dtype=dtype), x.new_empty(
        (columns, rows) if q_t else 0, dtype=dtype
    )


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, rows: bool, columns: bool, sums: bool,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (q, q_t, column sum) of x `[.., C]`; what is not wanted is empty."""
    x, width = x.contiguous(), x.shape[-1]
    height = x.numel() // width
    q, q_t = empty_orders(x, height, width, dtype, rows, columns)
    total = x.new_empty(width if sums else 0)
    launch = launch or (WITH_SUMS if sums else BOTH_ORDERS if columns else ONE_ORDER)
    grid = tile_grid(height, width, x.device, launch)
    partials = torch.empty(1, grid[1], width, dtype=torch.float32, device=x.device) if sums else None
    quantize_kernel[grid](
        x, scale, amax, q if rows else None, q_t if columns else None, partials, height, width,
        torch.finfo(dtype).max, DTYPES[dtype], launch.rows, launch.columns, launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    if partials is not None:
        sum_partials(partials, total)
    return q, q_t, total
