"""Triton kernels of `dtgpt.ops.fp8.quantize`, and what kernels share that quantise their results. Needs Triton.

A tile is processed as four tiles of every fourth row. A thread then has four neighbouring rows of a column, whose 8-bit
values are one 32-bit word of the transposed result: words, not bytes, change their order through shared memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.fp8.product import ROWS
from dtgpt.ops.kernels.column_kernels import sum_partials
from dtgpt.ops.kernels.devices import multiprocessors
from dtgpt.ops.kernels.machine import PTX

NAN = tl.constexpr(tl.PropagateNan.ALL)


class QuantizeLaunch(NamedTuple):
    """How a kernel over tiles is distributed over the device."""

    rows: int  # of a tile, a multiple of ROWS
    columns: int
    warps: int  # of a program
    occupancy: int  # programs per multiprocessor; more than fit make a second wave
    stages: int  # of the software pipeline: tiles that a program prefetches


PLAIN = QuantizeLaunch(rows=64, columns=64, warps=2, occupancy=1 << 10, stages=1)  # a program for each tile
WITH_SUMS = QuantizeLaunch(rows=64, columns=64, warps=4, occupancy=8, stages=1)
BYTES = QuantizeLaunch(rows=64, columns=128, warps=4, occupancy=1 << 10, stages=1)
CELLS = ["scale", "amax"]  # elements of vectors, at any address: one binary serves all


@triton.jit
def bytes_of(values, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Return fp32 values in an 8-bit format. A GPU's conversion saturates by itself, and keeps NaN."""
    if not PTX:
        values = tl.minimum(tl.maximum(values, -LIMIT, NAN), LIMIT, NAN)
    return values.to(DTYPE)


@triton.jit
def words_of(a, b, c, d, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the four values of each place in an 8-bit format as one int32, that of `a` in the lowest byte."""
    if PTX:
        FORMAT: tl.constexpr = "e5m2x2" if LIMIT > 448 else "e4m3x2"
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high; cvt.rn.satfinite." + FORMAT + ".f32 low, $2, $1; cvt.rn.satfinite." + FORMAT
            + ".f32 high, $4, $3; mov.b32 $0, {low, high};}",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    word = bytes_of(a, LIMIT, DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    word |= bytes_of(b, LIMIT, DTYPE).to(tl.uint8, bitcast=True).to(tl.int32) << 8
    word |= bytes_of(c, LIMIT, DTYPE).to(tl.uint8, bitcast=True).to(tl.int32) << 16
    return word | (bytes_of(d, LIMIT, DTYPE).to(tl.uint8, bitcast=True).to(tl.int32) << 24)


@triton.jit
def scaled(values, scale):
    """Return values * scale; of an infinite value NaN, which 8 bits keep."""
    return values * scale + values * 0.0


@triton.jit
def store_orders(
    q, q_t, a, b, c, d, scale, first, rows, columns, mask, C: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantise the four tiles of rows `first` on, and store them to q `[rows, C]` and q_t `[C, rows]`; those that are
    None are left out. mask: of each tile `[GROUPS, columns]`."""
    a, b, c, d = scaled(a, scale), scaled(b, scale), scaled(c, scale), scaled(d, scale)
    group = tl.arange(0, GROUPS)
    if q is not None:
        place = q + first * C + (4 * C) * group[:, None] + columns[None, :]
        tl.store(place, bytes_of(a, LIMIT, DTYPE), mask)
        tl.store(place + C, bytes_of(b, LIMIT, DTYPE), mask)
        tl.store(place + 2 * C, bytes_of(c, LIMIT, DTYPE), mask)
        tl.store(place + 3 * C, bytes_of(d, LIMIT, DTYPE), mask)
    if q_t is not None:
        words = q_t.to(tl.pointer_type(tl.int32), bitcast=True)
        place = columns.to(tl.int64)[:, None] * (rows // 4) + first // 4 + group[None, :]
        inside = (columns < C)[:, None] & (group < (rows - first) // 4)[None, :]
        tl.store(words + place, tl.trans(words_of(a, b, c, d, LIMIT, DTYPE)), inside)


@triton.jit
def largest_of(largest, a, b, c, d):
    """Return the maximum of `largest` and of the magnitudes of four tiles; NaN where one is NaN."""
    first = tl.maximum(tl.abs(a), tl.abs(b), NAN)
    return tl.maximum(tl.maximum(largest, first, NAN), tl.maximum(tl.abs(c), tl.abs(d), NAN), NAN)


@triton.jit
def raise_amax(amax, largest):
    """Raise the cell to the maximum of a tile of magnitudes. As integers they have the same order, in which NaN is
    largest. The order of programs does not matter."""
    bits = tl.max(tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    cell = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    if bits > tl.load(cell):  # most programs spare the atomic operation; an outdated value only costs one
        tl.atomic_max(cell, bits, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=CELLS)
def quantize_kernel(
    x, scale, amax, q, q_t, partials, rows, C: tl.constexpr,
    LIMIT: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Quantise x `[rows, C]` to q and q_t, raise amax, and sum x to partials `[programs along the rows, C]`; those
    that are None are left out."""
    factor = tl.load(scale)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    group = tl.arange(0, GROUPS)
    place = x + (4 * C) * group[:, None] + columns[None, :]
    largest = tl.zeros([GROUPS, BLOCK], tl.float32)
    sums = tl.zeros([GROUPS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, 4 * GROUPS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * (4 * GROUPS)
        mask = (group < (rows - first) // 4)[:, None] & inside[None, :]
        a = tl.load(place + first * C, mask, 0.0).to(tl.float32)
        b = tl.load(place + first * C + C, mask, 0.0).to(tl.float32)
        c = tl.load(place + first * C + 2 * C, mask, 0.0).to(tl.float32)
        d = tl.load(place + first * C + 3 * C, mask, 0.0).to(tl.float32)
        store_orders(q, q_t, a, b, c, d, factor, first, rows, columns, mask, C, LIMIT, DTYPE, GROUPS)
        if amax is not None:
            largest = largest_of(largest, a, b, c, d)
        if partials is not None:
            sums += (a + b) + (c + d)
    if amax is not None:
        raise_amax(amax, largest)
    if partials is not None:
        tl.store(partials + tl.program_id(1) * C + columns, tl.sum(sums, 0), inside)


@triton.jit
def transpose_kernel(q, q_t, rows, C: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the bytes of q `[rows, C]` to q_t `[C, rows]` in words of four rows."""
    first = tl.cast(tl.program_id(1), tl.int64) * (4 * GROUPS)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.arange(0, GROUPS)
    left = (rows - first) // 4
    mask = (group < left)[:, None] & (columns < C)[None, :]
    place = q + first * C + (4 * C) * group[:, None] + columns[None, :]
    word = tl.load(place, mask, 0).to(tl.int32)
    word |= tl.load(place + C, mask, 0).to(tl.int32) << 8
    word |= tl.load(place + 2 * C, mask, 0).to(tl.int32) << 16
    word |= tl.load(place + 3 * C, mask, 0).to(tl.int32) << 24
    words = q_t.to(tl.pointer_type(tl.int32), bitcast=True)
    to = columns.to(tl.int64)[:, None] * (rows // 4) + first // 4 + group[None, :]
    tl.store(words + to, tl.trans(word), (columns < C)[:, None] & (group < left)[None, :])


DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def tile_grid(rows: int, columns: int, device: torch.device, launch: QuantizeLaunch) -> tuple[int, int]:
    """Return (blocks of columns, programs along the rows)."""
    blocks = triton.cdiv(columns, launch.columns)
    programs = multiprocessors(device) * launch.occupancy // blocks
    return blocks, max(min(programs, triton.cdiv(rows, launch.rows)), 1)


def tile_options(dtype: torch.dtype, launch: QuantizeLaunch) -> tuple:
    """Return the constants LIMIT, DTYPE, GROUPS, BLOCK and STAGES of a kernel."""
    return torch.finfo(dtype).max, DTYPES[dtype], launch.rows // ROWS, launch.columns, launch.stages


def empty_orders(x: Tensor, rows: int, columns: int, dtype: torch.dtype, q: bool, q_t: bool) -> tuple[Tensor, Tensor]:
    """Return memory for q `[rows, columns]` and q_t `[columns, rows]`, empty where one is not wanted."""
    shapes = (rows, columns) if q else (0,), (columns, rows) if q_t else (0,)
    return x.new_empty(shapes[0], dtype=dtype), x.new_empty(shapes[1], dtype=dtype)


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, rows: bool, columns: bool, sums: bool,
    launch: QuantizeLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (q, q_t, column sum) of x `[.., C]`; what is not wanted is empty."""
    x, width = x.contiguous(), x.shape[-1]
    height = x.numel() // width
    q, q_t = empty_orders(x, height, width, dtype, rows, columns)
    total = x.new_empty(width if sums else 0)
    launch = launch or (WITH_SUMS if sums else PLAIN)
    grid = tile_grid(height, width, x.device, launch)
    partials = torch.empty(1, grid[1], width, dtype=torch.float32, device=x.device) if sums else None
    quantize_kernel[grid](
        x, scale, amax, q if rows else None, q_t if columns else None, partials, height, width,
        *tile_options(dtype, launch), num_warps=launch.warps,
    )  # fmt: skip
    if partials is not None:
        sum_partials(partials, total)
    return q, q_t, total


def transpose(q: Tensor, launch: QuantizeLaunch = BYTES) -> Tensor:
    """Return q_t `[C, R]` of q uint8 `[R, C]`."""
    (height, width), q = q.shape, q.contiguous()
    q_t = q.new_empty(width, height)
    grid = triton.cdiv(width, launch.columns), triton.cdiv(height, launch.rows)
    transpose_kernel[grid](q, q_t, height, width, launch.rows // ROWS, launch.columns, num_warps=launch.warps)
    return q_t
