"""Triton kernels of `layer_norm`, `residual` and `dtgpt.ops.pointwise.bias`. Needs Triton.

Sums over rows take two stages, so that they are the same in every run: each program goes over many rows with its sums
in fp32 registers and writes one partial row; a second, small kernel adds the partial rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.fast import multiprocessors
from dtgpt.ops.random.dropout import LANES, keep_scale, threshold
from dtgpt.ops.random.triton_philox import keep_tile


class Launch(NamedTuple):
    """How a kernel is distributed over the device."""

    rows: int  # of a tile where a thread has `width` columns of a row; fewer where rows are longer
    width: int  # columns of one row per thread
    occupancy: int  # warps per multiprocessor in all programs together; more than fit make a second wave
    stages: int  # of the software pipeline: tiles that a program prefetches


NORM_FORWARD = Launch(rows=4, width=8, occupancy=16, stages=2)
NORM_BACKWARD = Launch(rows=4, width=8, occupancy=12, stages=2)
COLUMN_SUM = Launch(rows=8, width=8, occupancy=32, stages=1)
MOST_WARPS = 16  # of a program
COLUMN_BLOCK = 1024  # columns of a tile in kernels that need not see whole rows
PREFETCHED = 8192  # elements of the largest tile to prefetch: a larger one would spill registers
SUM_TILE = 128, 32  # rows and columns of a tile of the second stage


def shape_of_tile(columns: int, launch: Launch) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile for rows of `columns`."""
    block = max(triton.next_power_of_2(columns), 2 * LANES)
    warps = min(max(block // (32 * launch.width), 1), MOST_WARPS)
    per_thread = max(block // (32 * warps * launch.width), 1)
    return max(launch.rows // per_thread, 1), block, warps


# Sizes that differ between batches and shards. They are not specialised, so that one binary serves all of them.
SIZES = ["tiles", "tiles_per_sample", "length", "first_row", "first_block", "key_stride", "drop"]


@triton.jit
def add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit(do_not_specialize=SIZES)
def norm_forward_kernel(
    x, branch, branch_bias, weight, bias, key, total, normed, mean, rstd,
    tiles, tiles_per_sample, length, first_row, first_block, key_stride, drop, scale, eps,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute total = x + dropout(branch + branch_bias) where there is a branch, and normed = LayerNorm(total) where
    there is a weight. A tile is ROWS whole rows of one sample, which has `length` rows."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    if branch_bias is not None:
        shift = tl.load(branch_bias + columns, inside, 0.0).to(tl.float32)[None, :]
    if weight is not None:
        gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)[None, :]
        offset = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    local = tl.arange(0, ROWS)
    place = local[:, None] * H + columns[None, :]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        sample, row = tile // tiles_per_sample, tile % tiles_per_sample * ROWS
        first = sample.to(tl.int64) * length + row
        there = local < length - row
        mask = there[:, None] & inside[None, :]
        values = tl.load(x + first * H + place, mask, 0.0).to(tl.float32)
        if branch is not None:
            added = tl.load(branch + first * H + place, mask, 0.0).to(tl.float32)
            if branch_bias is not None:
                added += shift
            if key is not None:
                k0, k1 = tl.load(key + sample * key_stride), tl.load(key + sample * key_stride + 1)
                blocks = first_block + tl.arange(0, BLOCK // 8)
                keep = keep_tile(k0, k1, first_row + row + local, blocks, 0, 0, drop)
                added = tl.where(keep, added * scale, 0.0)
            rounded = (values + added).to(total.dtype.element_ty)
            tl.store(total + first * H + place, rounded, mask)
            values = rounded.to(tl.float32)  # what backward will read
        if weight is not None:
            average = tl.sum(values, 1) / H
            centred = tl.where(inside[None, :], values - average[:, None], 0.0)
            inverse = tl.rsqrt(tl.sum(centred * centred, 1) / H + eps)
            tl.store(normed + first * H + place, centred * inverse[:, None] * gain + offset, mask)
            tl.store(mean + first + local, average, there)
            tl.store(rstd + first + local, inverse, there)


@triton.jit(do_not_specialize=SIZES)
def norm_backward_kernel(
    d_normed, d_sum, total, mean, rstd, weight, key, dx, d_branch, dweight, dbias, d_branch_bias,
    tiles, tiles_per_sample, length, first_row, first_block, key_stride, drop, scale,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `norm_forward_kernel`. Tensors that are None are neither read nor written; dweight,
    dbias and d_branch_bias take one partial row of each program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    if weight is not None:
        gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    branch_sum = tl.zeros([BLOCK], tl.float32)
    local = tl.arange(0, ROWS)
    place = local[:, None] * H + columns[None, :]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        sample, row = tile // tiles_per_sample, tile % tiles_per_sample * ROWS
        first = sample.to(tl.int64) * length + row
        there = local < length - row
        mask = there[:, None] & inside[None, :]
        gradient = tl.zeros([ROWS, BLOCK], tl.float32)
        if d_sum is not None:
            gradient = tl.load(d_sum + first * H + place, mask, 0.0).to(tl.float32)
        if weight is not None:
            dy = tl.load(d_normed + first * H + place, mask, 0.0).to(tl.float32)
            values = tl.load(total + first * H + place, mask, 0.0).to(tl.float32)
            average = tl.load(mean + first + local, there, 0.0)[:, None]
            inverse = tl.load(rstd + first + local, there, 0.0)[:, None]
            xhat = (values - average) * inverse
            weighted = dy * gain
            # One reduction of pairs synchronises the warps once, two would do so twice.
            common, along = tl.reduce((weighted, weighted * xhat), 1, add_pairs)
            common, along = common / H, along / H
            gradient += inverse * (weighted - common[:, None] - xhat * along[:, None])
            weight_sum += tl.sum(dy * xhat, 0)
            bias_sum += tl.sum(dy, 0)
        if dx is not None:
            tl.store(dx + first * H + place, gradient, mask)
        if key is not None:
            k0, k1 = tl.load(key + sample * key_stride), tl.load(key + sample * key_stride + 1)
            blocks = first_block + tl.arange(0, BLOCK // 8)
            keep = keep_tile(k0, k1, first_row + row + local, blocks, 0, 0, drop)
            gradient = tl.where(keep, gradient * scale, 0.0)
            tl.store(d_branch + first * H + place, gradient, mask)
        if d_branch_bias is not None:
            branch_sum += tl.sum(gradient, 0)
    partial = tl.program_id(0) * H + columns
    if weight is not None:
        tl.store(dweight + partial, weight_sum, inside)
        tl.store(dbias + partial, bias_sum, inside)
    if d_branch_bias is not None:
        tl.store(d_branch_bias + partial, branch_sum, inside)


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
    rows, block = SUM_TILE
    outs = [*outputs, None, None][:3]
    sum_partials_kernel[(triton.cdiv(columns, block), number)](partials, *outs, count, columns, rows, block)


def dropout_arguments(key: Tensor | None, p: float, start: Sequence[int]) -> tuple[int, int, int, int, float]:
    """Return (first_row, first_block, key_stride, drop, scale) for a kernel."""
    return (
        (0, 0, 0, 0, 1.0) if key is None else (start[0], start[1] // LANES, key.stride(0), threshold(p), keep_scale(p))
    )


def tiling(x: Tensor, key: Tensor | None, rows: int, warps: int, launch: Launch) -> tuple[int, int, int, int]:
    """Return (programs, tiles, tiles_per_sample, length); without a key all rows count as one sample."""
    samples = x.shape[0] if key is not None else 1
    length = x.numel() // (max(samples, 1) * x.shape[-1])
    tiles = samples * triton.cdiv(length, rows)
    programs = multiprocessors(x.device) * max(launch.occupancy // warps, 1)
    return max(min(programs, tiles), 1), tiles, triton.cdiv(length, rows), length


def norm_forward(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, key: Tensor | None, p: float, start: Sequence[int], launch: Launch = NORM_FORWARD,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return (total, normed, mean, rstd): total is None without a branch, the others without a weight."""
    x, branch = x.contiguous(), None if branch is None else branch.contiguous()
    total = None if branch is None else torch.empty_like(x)
    normed = mean = rstd = None
    if weight is not None:
        normed = torch.empty_like(x)
        mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    columns = x.shape[-1]
    rows, block, warps = shape_of_tile(columns, launch)
    programs, *sizes = tiling(x, key, rows, warps, launch)
    norm_forward_kernel[(programs,)](
        x, branch, branch_bias, weight, bias, key, total, normed, mean, rstd,
        *sizes, *dropout_arguments(key, p, start), eps, columns, rows, block, launch.stages, num_warps=warps,
    )  # fmt: skip
    return total, normed, mean, rstd


def norm_backward(
    d_normed: Tensor | None, d_sum: Tensor | None, total: Tensor | None, mean: Tensor | None, rstd: Tensor | None,
    weight: Tensor | None, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int],
    launch: Launch = NORM_BACKWARD,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return (dx, d_branch, dweight, dbias, d_branch_bias).

    d_branch is None without a key (it equals dx), dx without d_normed (it equals d_sum), and the gradient of a vector
    where the vector is None. One of d_normed and d_sum is a tensor.
    """
    d_normed, d_sum, total = (None if t is None else t.contiguous() for t in (d_normed, d_sum, total))
    like = d_sum if d_normed is None else d_normed
    assert like is not None
    columns = like.shape[-1]
    rows, block, warps = shape_of_tile(columns, launch)
    programs, *sizes = tiling(like, key, rows, warps, launch)
    stages = launch.stages if rows * block <= PREFETCHED else 1
    dx = None if weight is None else torch.empty_like(like)
    d_branch = None if key is None else torch.empty_like(like)
    dweight, dbias, d_branch_bias = made = tuple(
        None if vector is None else torch.empty_like(vector) for vector in (weight, weight, branch_bias)
    )
    wanted = [vector for vector in made if vector is not None]
    partials = torch.empty(len(wanted), programs, columns, dtype=torch.float32, device=like.device)
    remaining = iter(partials)
    norm_backward_kernel[(programs,)](
        d_normed, d_sum, total, mean, rstd, weight, key, dx, d_branch,
        *(None if vector is None else next(remaining) for vector in made),
        *sizes, *dropout_arguments(key, p, start), columns, rows, block, stages, num_warps=warps,
    )  # fmt: skip
    if wanted:
        sum_partials(partials, *wanted)
    return dx, d_branch, dweight, dbias, d_branch_bias


def column_grid(rows: int, columns: int, device: torch.device, launch: Launch) -> tuple[tuple[int, int], int, int, int]:
    """Return ((blocks of columns, programs along the rows), rows, columns, warps), the latter three of a tile."""
    tile, block, warps = shape_of_tile(min(columns, COLUMN_BLOCK), launch)
    blocks = triton.cdiv(columns, block)
    programs = multiprocessors(device) * max(launch.occupancy // warps, 1) // blocks
    return (blocks, max(min(programs, triton.cdiv(rows, tile)), 1)), tile, block, warps


def column_sum(x: Tensor, launch: Launch = COLUMN_SUM) -> Tensor:
    """Sum x `[.., F]` to `[F]`."""
    x, columns = x.contiguous(), x.shape[-1]
    rows = x.numel() // columns
    grid, tile, block, warps = column_grid(rows, columns, x.device, launch)
    partials = torch.empty(1, grid[1], columns, dtype=torch.float32, device=x.device)
    column_sum_kernel[grid](x, partials, rows, columns, tile, block, launch.stages, num_warps=warps)
    out = torch.empty(columns, dtype=x.dtype, device=x.device)
    sum_partials(partials, out)
    return out
