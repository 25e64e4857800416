"""Sums over rows, and how kernels over rows are distributed over a GPU. Needs Triton.

Sums over rows take two stages, so that they are the same in every run: each program goes over many rows with its sums
in fp32 registers and writes one partial row; a second, small kernel adds the partial rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.devices import multiprocessors
from dtgpt.ops.random.dropout import LANES


class ColumnLaunch(NamedTuple):
    """How a kernel is distributed over the device."""

    rows: int  # of a tile where a thread has `width` columns of a row; fewer where rows are longer
    width: int  # columns of one row per thread
    occupancy: int  # warps per multiprocessor in all programs together; more than fit make a second wave
    stages: int  # of the software pipeline: tiles that a program prefetches


COLUMN_SUM = ColumnLaunch(rows=8, width=8, occupancy=32, stages=1)
MOST_WARPS = 16  # of a program
COLUMN_BLOCK = 1024  # columns of a tile in kernels that need not see whole rows
SUM_TILE = 256, 16, 8  # rows, columns and warps of a tile of the second stage


def shape_of_tile(columns: int, launch: ColumnLaunch) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile for rows of `columns`."""
    block = max(triton.next_power_of_2(columns), 2 * LANES)
    warps = min(max(block // (32 * launch.width), 1), MOST_WARPS)
    per_thread = max(block // (32 * warps * launch.width), 1)
    return max(launch.rows // per_thread, 1), block, warps


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(
    x, partials, rows, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Sum x `[rows, H]` to partials `[programs along the rows, H]`."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    local = tl.arange(0, ROWS)
    place = local[:, None] * H + columns[None, :]
    sums = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        mask = (local < rows - first)[:, None] & inside[None, :]
        sums += tl.sum(tl.load(x + first * H + place, mask, 0.0).to(tl.float32), 0)
    tl.store(partials + tl.program_id(1) * H + columns, sums, inside)


@triton.jit(do_not_specialize=["count"])
def sum_partials_kernel(partials, out0, out1, out2, count, H, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum partials `[outputs, count, H]` over `count`, each to its own output `[H]`."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    local = tl.arange(0, ROWS)
    partials += tl.program_id(1).to(tl.int64) * count * H
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        mask = (local < count - first)[:, None] & inside[None, :]
        sums += tl.load(partials + (first + local)[:, None] * H + columns[None, :], mask, 0.0)
    result = tl.sum(sums, 0)
    if tl.program_id(1) == 0:
        tl.store(out0 + columns, result, inside)
    if out1 is not None and tl.program_id(1) == 1:
        tl.store(out1 + columns, result, inside)
    if out2 is not None and tl.program_id(1) == 2:
        tl.store(out2 + columns, result, inside)


def sum_partials(partials: Tensor, *outputs: Tensor) -> None:
    """Sum partials, fp32 `[outputs, count, H]`, into one to three outputs `[H]` in one launch."""
    number, count, columns = partials.shape
    rows, block, warps = SUM_TILE
    outs = [*outputs, None, None][:3]
    grid = (triton.cdiv(columns, block), number)
    sum_partials_kernel[grid](partials, *outs, count, columns, rows, block, num_warps=warps)


def column_grid(
    rows: int, columns: int, device: torch.device, launch: ColumnLaunch, blocks: int = 0
) -> tuple[tuple[int, int], int, int, int]:
    """Return ((blocks of columns, programs along the rows), rows, columns, warps), the latter three of a tile. As many
    programs as fit: with `blocks` for so many whole blocks, however many there are, so that the order in which a column
    is summed does not depend on others."""
    tile, block, warps = shape_of_tile(min(columns, COLUMN_BLOCK), launch)
    own = triton.cdiv(columns, block)
    together = shape_of_tile(COLUMN_BLOCK, launch)[2] if blocks else warps
    programs = multiprocessors(device) * max(launch.occupancy // together, 1) // (blocks or own)
    return (own, max(min(programs, triton.cdiv(rows, tile)), 1)), tile, block, warps


def column_sum(
    x: Tensor, launch: ColumnLaunch = COLUMN_SUM, dtype: torch.dtype | None = None, blocks: int = 0
) -> Tensor:
    """Sum x `[.., F]` to `[F]`, in the dtype of x unless another one is given. blocks: see `column_grid`."""
    x, columns = x.contiguous(), x.shape[-1]
    rows = x.numel() // columns
    grid, tile, block, warps = column_grid(rows, columns, x.device, launch, blocks)
    partials = torch.empty(1, grid[1], columns, dtype=torch.float32, device=x.device)
    column_sum_kernel[grid](x, partials, rows, columns, tile, block, launch.stages, num_warps=warps)
    out = torch.empty(columns, dtype=dtype or x.dtype, device=x.device)
    sum_partials(partials, out)
    return out
