"""What serves the sums of pieces on a GPU. Needs Triton.

A product of 16-bit matrices that sums K in one chain of tensor-core operations has the same bits in tiles of any size,
and so has one of cuBLAS that does not split K. `tree_kernel` adds up the pieces of a tile in registers: what PyTorch
would write for each piece is never in memory. `piece_sums_kernel` sums the rows of groups of a fixed size, and
`fold_kernel` the groups of each piece.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.parallel.exact_tp.products import operand
from dtgpt.parallel.exact_tp.tree import tree_sum

MOST = 8  # pieces of a program
ROWS = 32  # of a group, at most
FOLD = 16, 64  # groups and columns of a tile of the second stage


class TreeTile(NamedTuple):
    """Tile sizes and compile options of `tree_kernel`."""

    BM: int = 128
    BN: int = 128
    BK: int = 64
    num_warps: int = 8
    num_stages: int = 4


TILE = TreeTile()


@triton.jit
def piece(x, w, row, column, start, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_INPUTS: tl.constexpr):
    """Return the product of a piece for a tile, fp32 `[BM, BN]`."""
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(start, start + K, BK):
        w_part = w.load([column, k]).T if BY_INPUTS else w.load([k, column])
        total = tl.dot(x.load([row, k]), w_part, total)
    return total


@triton.jit
def node(
    x, w, row, column, start, K,
    COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the sum of COUNT pieces from `start` on, in a tree whose nodes are rounded to the type of x."""
    if COUNT == 1:
        made = piece(x, w, row, column, start, K, BM, BN, BK, BY_INPUTS)
    else:
        left = node(x, w, row, column, start, K, COUNT // 2, BM, BN, BK, BY_INPUTS)
        right = node(x, w, row, column, start + COUNT // 2 * K, K, COUNT // 2, BM, BN, BK, BY_INPUTS)
        made = left.to(tl.float32) + right.to(tl.float32)
    return made.to(x.dtype)


@triton.jit
def tree_kernel(
    x, w, out, rows, K, COLUMNS: tl.constexpr,
    COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Write a tile of the sum of COUNT pieces of K each: x `[M, COUNT K]`, w `[N, COUNT K]` where it is BY_INPUTS, else
    `[COUNT K, N]`, and out `[M, N]`; x and w are descriptors. Tiles divide M and N; GROUP rows of tiles
    share the columns in L2."""
    down, across = rows // BM, COLUMNS // BN
    first = tl.program_id(0) // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    inner = tl.program_id(0) % (GROUP * across)
    row, column = (first + inner % high) * BM, inner // high * BN
    corner = out + row.to(tl.int64) * COLUMNS + column
    at = corner + (tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, BN)[None, :])
    if COUNT == 8:  # there are registers for two nodes that wait, and not for three
        tl.store(at, node(x, w, row, column, 0, K, 4, BM, BN, BK, BY_INPUTS))
        right = node(x, w, row, column, 4 * K, K, 4, BM, BN, BK, BY_INPUTS)
        made = (tl.load(at).to(tl.float32) + right.to(tl.float32)).to(x.dtype)
    else:
        made = node(x, w, row, column, 0, K, COUNT, BM, BN, BK, BY_INPUTS)
    tl.store(at, made)


def tree_product(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    """Return the sum over `count` pieces of K of x `[M, K]` and a weight, `[N, K]` where pieces are of its inputs, else
    `[K, N]`."""
    x, weight, parts = operand(x), operand(weight), max(1, count // MOST)
    pairs = zip(x.chunk(parts, 1), weight.chunk(parts, int(by_inputs)), strict=True)
    return tree_sum(_launch_tree(*pair, count // parts, by_inputs) for pair in pairs)


def _launch_tree(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, size), columns, tile = x.shape, weight.shape[0 if by_inputs else 1], TILE
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    given = TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.BM, tile.BK])
    block = [tile.BN, tile.BK] if by_inputs else [tile.BK, tile.BN]
    matrix = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)
    grid = (rows // tile.BM * (columns // tile.BN),)
    tree_kernel[grid](
        given, matrix, out, rows, size // count, COLUMNS=columns,
        COUNT=count, BM=tile.BM, BN=tile.BN, BK=tile.BK, BY_INPUTS=by_inputs, GROUP=8,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def fits(rows: int, columns: int, terms: int) -> bool:
    """Return whether `tree_product` serves so many rows and columns of a product, and terms of a piece: whole tiles."""
    return rows % TILE.BM == columns % TILE.BN == terms % TILE.BK == 0


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
    groups, each = samples * positions // rows, positions // count // rows
    block = min(triton.next_power_of_2(size), 128) if x is None else triton.next_power_of_2(size)
    tile = min(rows, max(1, 4096 // block))
    partials = torch.empty(kinds, groups, size, dtype=torch.float32, device=dy.device)
    piece_sums_kernel[(groups, triton.cdiv(size, block))](
        dy, x, partials, groups, eps, H=size, ROWS=rows, TILE=tile, BLOCK=block, CENTRED=centred,
        num_warps=4 if block * tile <= 4096 else 8,
    )  # fmt: skip
    sums = torch.empty(count, kinds, size, dtype=torch.float32, device=dy.device)
    height, width = FOLD
    fold_kernel[(triton.cdiv(size, width), count, kinds)](
        partials, sums, groups, count, each, samples * each, size, kinds=kinds, ROWS=height, BLOCK=width, num_warps=4
    )
    return sums
