"""Sums over rows in pieces of the positions on a GPU. Needs Triton.

The rows of groups of a fixed size are summed, in the pass that makes the gradient of a norm where there is one, else by
`piece_sums_kernel`; `fold_kernel` sums the groups of each piece, and `tree_of_stack_kernel` the pieces of all ranks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.column_kernels import ColumnLaunch, column_sum
from dtgpt.ops.kernels.gelu_kernels import bias_gelu_backward, bias_gelu_forward
from dtgpt.ops.kernels.norm_kernels import norm_forward, norm_gradients
from dtgpt.parallel.exact_tp.products import operand
from dtgpt.parallel.exact_tp.tree import Share

ROWS = 32  # of a group, at most
LAYER_NORM = ColumnLaunch(rows=2, width=8, occupancy=0, stages=3)  # a program for each group
FOLD = 16, 64  # groups and columns of a tile of the second stage
BLOCK = 512  # columns of a tile of the tree
# Blocks of columns with which programs that go through all rows fill a GPU, however many there are.
ACTIVATED_BLOCKS, SUMMED_BLOCKS = 2, 3


@triton.jit
def piece_sums_kernel(
    dy, x, partials, groups, eps,
    H: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Sum the ROWS rows of a group of dy `[groups ROWS, H]` to partials fp32 `[1, groups, H]`. With x of the shape of
    dy, whose rows a tile has whole: also of dy times x, normalised by RMSNorm or, CENTRED, by LayerNorm, to partials
    `[2, groups, H]`: the latter first."""
    group = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < H)[None, :]
    plain, scaled = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, ROWS, TILE):
        at = (group * ROWS + first + tl.arange(0, TILE))[:, None] * H + columns[None, :]
        terms = tl.load(dy + at, inside, 0.0).to(tl.float32)
        plain += tl.sum(terms, 0)
        if x is not None:
            values = tl.load(x + at, inside, 0.0).to(tl.float32)
            if CENTRED:
                values = tl.where(inside, values - (tl.sum(values, 1) / H)[:, None], 0.0)
            scale = tl.rsqrt(tl.sum(values * values, 1) / H + eps)
            scaled += tl.sum(terms * (values * scale[:, None]), 0)
    if x is not None:
        tl.store(partials + group * H + columns, scaled, columns < H)
        tl.store(partials + (groups + group) * H + columns, plain, columns < H)
    else:
        tl.store(partials + group * H + columns, plain, columns < H)


@triton.jit
def fold_kernel(
    partials, sums, groups, count, each, of_piece, H, kinds: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the `of_piece` groups of a piece of partials `[kinds, groups, H]` to sums `[count, kinds, H]`: `each` of
    every sample."""
    index, kind = tl.program_id(1), tl.program_id(2)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, of_piece, ROWS):
        place = first + tl.arange(0, ROWS)
        group = place // each * (count * each) + index * each + place % each
        at = (kind * groups + group).to(tl.int64)[:, None] * H + columns[None, :]
        total += tl.load(partials + at, (place < of_piece)[:, None] & inside[None, :], 0.0)
    tl.store(sums + (index * kinds + kind) * H + columns, tl.sum(total, 0), inside)


def rows_of_group(positions: int) -> int:
    """Return the rows of a group, which divide so many positions of a piece."""
    return min(ROWS, positions & -positions)


def piece_sums(dy: Tensor, x: Tensor | None, count: int, eps: float, centred: bool) -> Tensor:
    """Return what `dtgpt.parallel.exact_tp.rows.PIECE_SUMS` does."""
    dy, x = operand(dy), None if x is None else operand(x)
    samples, positions, size = dy.shape
    rows, kinds = rows_of_group(positions // count), 1 if x is None else 2
    groups = samples * positions // rows
    block = min(triton.next_power_of_2(size), 128) if x is None else triton.next_power_of_2(size)
    tile = min(rows, max(1, 4096 // block))
    partials = torch.empty(kinds, groups, size, dtype=torch.float32, device=dy.device)
    piece_sums_kernel[(groups, triton.cdiv(size, block))](
        dy, x, partials, groups, eps, H=size, ROWS=rows, TILE=tile, BLOCK=block, CENTRED=centred,
        num_warps=4 if block * tile <= 4096 else 8,
    )  # fmt: skip
    return fold(partials, count, samples)


def fold(partials: Tensor, count: int, samples: int) -> Tensor:
    """Return the sums `[count, kinds, H]` of partials `[kinds, groups, H]`: of the groups of each of `count` pieces of
    every sample."""
    kinds, groups, size = partials.shape
    of_piece = groups // count
    sums = torch.empty(count, kinds, size, dtype=torch.float32, device=partials.device)
    height, width = FOLD
    fold_kernel[(triton.cdiv(size, width), count, kinds)](
        partials, sums, groups, count, of_piece // samples, of_piece, size, kinds=kinds, ROWS=height, BLOCK=width,
        num_warps=4,
    )  # fmt: skip
    return sums


@triton.jit
def tree_of_stack_kernel(x, out, size, COUNT: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of COUNT rows of x `[COUNT, size]`, in a tree of 2^LEVELS rows, to out `[size]`."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nodes = tl.load(x + tl.arange(0, COUNT)[:, None] * size + columns[None, :], (columns < size)[None, :], 0.0)
    for _ in tl.static_range(LEVELS):
        nodes = tl.sum(tl.reshape(nodes, (nodes.shape[0] // 2, 2, BLOCK)), 1)  # of two, which have no order
    tl.store(out + columns, tl.reshape(nodes, (BLOCK,)), columns < size)


def tree_of_stack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `dtgpt.parallel.exact_tp.tree.TREE_OF_STACK` does."""
    x, count = x.contiguous(), len(x)
    out = torch.empty(x.shape[1:], dtype=dtype, device=x.device)
    tree_of_stack_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        x, out, out.numel(), COUNT=count, LEVELS=count.bit_length() - 1, BLOCK=BLOCK, num_warps=4
    )
    return out


class NormInPieces(torch.autograd.Function):
    """What `dtgpt.parallel.exact_tp.rows.NORM_IN_PIECES` returns, in one pass over the rows each way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, eps: float, key: Tensor | None, p: float, start: Any, share: Share,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        total, normed, mean, rstd = norm_forward(x, branch, branch_bias, weight, bias, eps, key, p, start)
        total = x.view_as(x) if total is None else total
        ctx.save_for_backward(None if weight is None else total, mean, rstd, weight, branch_bias, key)
        ctx.p, ctx.start, ctx.share = p, start, share
        ctx.has_branch, ctx.has_bias = branch is not None, bias is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (total, mean, rstd, weight, branch_bias, key), share = ctx.saved_tensors, ctx.share
        d_total, d_normed = grads
        if d_normed is None and weight is not None:
            d_normed = torch.zeros_like(total)
        like = d_total if d_normed is None else d_normed
        of_group = rows_of_group(like.shape[1] // share.number)
        dx, d_branch, partials = norm_gradients(
            d_normed, d_total, total, mean, rstd, weight, branch_bias, key, ctx.p, ctx.start,
            None if mean is None else LAYER_NORM, of_group,
        )  # fmt: skip
        dx = d_total if dx is None else dx
        vectors = weight, weight if ctx.has_bias else None, branch_bias
        made: list[Tensor | None] = [None] * 3
        if len(partials):
            dtype = next(vector.dtype for vector in vectors if vector is not None)
            sums = iter(tree_of_stack(share.gather(fold(partials, share.number, len(like))), dtype))
            made = [None if vector is None else next(sums) for vector in vectors]
        d_branch = (dx if d_branch is None else d_branch) if ctx.has_branch else None
        return dx, d_branch, made[2], made[0], made[1], *[None] * 5


class ActivatedInPieces(torch.autograd.Function):
    """gelu_tanh(x + bias), or relu(x + bias)^2, of columns whose sums over the rows do not depend on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, relu2: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.relu2 = relu2
        return bias_gelu_forward(x, bias, relu2=relu2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        return *bias_gelu_backward(grads[0], x, bias, relu2=ctx.relu2, blocks=ACTIVATED_BLOCKS), None


def column_sums(x: Tensor, count: int) -> Tensor:
    """Return what `dtgpt.parallel.exact_tp.products.COLUMN_SUMS` does."""
    return column_sum(x, dtype=torch.float32, blocks=SUMMED_BLOCKS)
