"""Triton kernels of `norm` and `residual`. Needs Triton.

Tiles are taken from the last rows to the first. The matrix product before a kernel writes its rows from the first to
the last, so that the L2 cache still holds the last ones, and the product after it reads those first that the kernel
wrote last. A step that is bound by power gains from every byte that is not read from device memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.column_kernels import ColumnLaunch, shape_of_tile, sum_partials
from dtgpt.ops.kernels.devices import multiprocessors
from dtgpt.ops.kernels.triton_philox import keep_tile
from dtgpt.ops.random.dropout import LANES, keep_scale, threshold

NORM_FORWARD = ColumnLaunch(rows=4, width=8, occupancy=16, stages=2)
NORM_BACKWARD = ColumnLaunch(rows=4, width=8, occupancy=12, stages=2)
RMS_FORWARD = ColumnLaunch(rows=2, width=8, occupancy=1 << 20, stages=1)  # a program for each tile
A_ROW = ColumnLaunch(rows=1, width=8, occupancy=1 << 20, stages=1)  # forward of few rows, a program for each
FILLS_A_WARP = 32 * 8  # columns of a row from which on its sums have the same order in tiles of any number of rows
RMS_BACKWARD = ColumnLaunch(rows=1, width=8, occupancy=32, stages=1)
PREFETCHED = 8192  # elements of the largest tile to prefetch: a larger one would spill registers

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
    """Compute total = x + dropout(branch + branch_bias) where there is a branch, and normed = LayerNorm(total), or
    RMSNorm(total) without a bias and a mean, where there is a weight. A tile is ROWS whole rows of one sample, which
    has `length` rows."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    if branch_bias is not None:
        shift = tl.load(branch_bias + columns, inside, 0.0).to(tl.float32)[None, :]
    if weight is not None:
        gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)[None, :]
    if bias is not None:
        offset = tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    local = tl.arange(0, ROWS)
    place = local[:, None] * H + columns[None, :]
    for before in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tile = tiles - 1 - before
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
            if mean is not None:
                average = tl.sum(values, 1) / H
                centred = tl.where(inside[None, :], values - average[:, None], 0.0)
                inverse = tl.rsqrt(tl.sum(centred * centred, 1) / H + eps)
                tl.store(normed + first * H + place, centred * inverse[:, None] * gain + offset, mask)
                tl.store(mean + first + local, average, there)
            else:
                inverse = tl.rsqrt(tl.sum(values * values, 1) / H + eps)
                tl.store(normed + first * H + place, values * inverse[:, None] * gain, mask)
            tl.store(rstd + first + local, inverse, there)


@triton.jit(do_not_specialize=SIZES)
def norm_backward_kernel(
    d_normed, d_sum, total, mean, rstd, weight, key, dx, d_branch, dweight, dbias, d_branch_bias,
    tiles, tiles_per_sample, length, first_row, first_block, key_stride, drop, scale,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `norm_forward_kernel`. Tensors that are None are neither read nor written; dweight,
    dbias and d_branch_bias take one partial row of each program. GROUP: tiles of a program, which are neighbours and
    whose partial row has their place among the others; 0: as many as there are for it, apart from each other."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    if weight is not None:
        gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    branch_sum = tl.zeros([BLOCK], tl.float32)
    local = tl.arange(0, ROWS)
    place = local[:, None] * H + columns[None, :]
    begin, end, apart = tl.program_id(0), tiles, tl.num_programs(0)
    line = begin
    if GROUP:
        begin, end, apart = begin * GROUP, (begin + 1) * GROUP, 1
        line = tl.num_programs(0) - 1 - line
    for before in tl.range(begin, end, apart, num_stages=STAGES):
        tile = tiles - 1 - before
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
            if mean is not None:
                values -= tl.load(mean + first + local, there, 0.0)[:, None]
            inverse = tl.load(rstd + first + local, there, 0.0)[:, None]
            xhat = values * inverse
            weighted = dy * gain
            if mean is not None:
                # One reduction of pairs synchronises the warps once, two would do so twice.
                common, along = tl.reduce((weighted, weighted * xhat), 1, add_pairs)
                common, along = common / H, along / H
                gradient += inverse * (weighted - common[:, None] - xhat * along[:, None])
            else:
                along = tl.sum(weighted * xhat, 1) / H
                gradient += inverse * (weighted - xhat * along[:, None])
            weight_sum += tl.sum(dy * xhat, 0)
            if dbias is not None:
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
    partial = line * H + columns
    if weight is not None:
        tl.store(dweight + partial, weight_sum, inside)
    if dbias is not None:
        tl.store(dbias + partial, bias_sum, inside)
    if d_branch_bias is not None:
        tl.store(d_branch_bias + partial, branch_sum, inside)


def dropout_arguments(key: Tensor | None, p: float, start: Sequence[int]) -> tuple[int, int, int, int, float]:
    """Return (first_row, first_block, key_stride, drop, scale) for a kernel."""
    return (
        (0, 0, 0, 0, 1.0) if key is None else (start[0], start[1] // LANES, key.stride(0), threshold(p), keep_scale(p))
    )


def tiling(x: Tensor, key: Tensor | None, rows: int, warps: int, launch: ColumnLaunch) -> tuple[int, int, int, int]:
    """Return (programs, tiles, tiles_per_sample, length); without a key all rows count as one sample."""
    samples = x.shape[0] if key is not None else 1
    length = x.numel() // (max(samples, 1) * x.shape[-1])
    tiles = samples * triton.cdiv(length, rows)
    programs = multiprocessors(x.device) * max(launch.occupancy // warps, 1)
    return max(min(programs, tiles), 1), tiles, triton.cdiv(length, rows), length


def norm_forward(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, key: Tensor | None, p: float, start: Sequence[int], launch: ColumnLaunch | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return (total, normed, mean, rstd): total is None without a branch, the others without a weight.

    A weight without a bias is that of an RMSNorm: mean is None, rstd the reciprocal root of the mean square plus eps.
    """
    launch = launch or (RMS_FORWARD if weight is not None and bias is None else NORM_FORWARD)
    x, branch = x.contiguous(), None if branch is None else branch.contiguous()
    total = None if branch is None else torch.empty_like(x)
    normed = mean = rstd = None
    if weight is not None:
        normed, rstd = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        mean = None if bias is None else torch.empty_like(rstd)
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
    launch: ColumnLaunch | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return (dx, d_branch, dweight, dbias, d_branch_bias).

    d_branch is None without a key (it equals dx), dx without d_normed (it equals d_sum), dbias without a mean (that of
    an RMSNorm), and the gradient of a vector where the vector is None. One of d_normed and d_sum is a tensor.
    """
    dx, d_branch, partials = norm_gradients(
        d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start, launch
    )
    dweight, dbias, d_branch_bias = made = tuple(
        None if vector is None else torch.empty_like(vector)
        for vector in (weight, None if mean is None else weight, branch_bias)
    )
    if len(partials):
        sum_partials(partials, *(vector for vector in made if vector is not None))
    return dx, d_branch, dweight, dbias, d_branch_bias


def norm_gradients(
    d_normed: Tensor | None, d_sum: Tensor | None, total: Tensor | None, mean: Tensor | None, rstd: Tensor | None,
    weight: Tensor | None, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int],
    launch: ColumnLaunch | None = None, of_group: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Return (dx, d_branch, partials) of `norm_backward`: partial sums of its other results that are not None, fp32
    `[results, groups, H]`, of groups of `of_group` rows, one after the other; 0: of any rows. Tiles of the rows divide
    a group, and groups the rows of a sample."""
    launch = launch or (RMS_BACKWARD if weight is not None and mean is None else NORM_BACKWARD)
    d_normed, d_sum, total = (None if t is None else t.contiguous() for t in (d_normed, d_sum, total))
    like = d_sum if d_normed is None else d_normed
    assert like is not None
    columns = like.shape[-1]
    rows, block, warps = shape_of_tile(columns, launch)
    programs, *sizes = tiling(like, key, rows, warps, launch)
    if of_group:
        programs = like.numel() // columns // of_group
    stages = launch.stages if rows * block <= PREFETCHED else 1
    dx = None if weight is None else torch.empty_like(like)
    d_branch = None if key is None else torch.empty_like(like)
    wanted = [vector is not None for vector in (weight, weight if mean is not None else None, branch_bias)]
    partials = torch.empty(sum(wanted), programs, columns, dtype=torch.float32, device=like.device)
    remaining = iter(partials)
    norm_backward_kernel[(programs,)](
        d_normed, d_sum, total, mean, rstd, weight, key, dx, d_branch,
        *(next(remaining) if want else None for want in wanted),
        *sizes, *dropout_arguments(key, p, start), columns, rows, block, stages, of_group // rows, num_warps=warps,
    )  # fmt: skip
    return dx, d_branch, partials
