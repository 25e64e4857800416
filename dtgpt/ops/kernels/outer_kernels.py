"""A Triton kernel that makes the gradients of experts' matrices and adds them to totals. Needs Triton, and on a GPU its
copy engine.

The copy engine reads whole tiles of rows; those of an expert that fill no tile are read by addresses, since the next
rows are another expert's. It adds a tile to the total in memory as well, so that no program waits to read it. Sums are
one chain over the rows, in their order, rounded to the rows' type: the bits of a product that writes its result.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.descriptors import described
from dtgpt.ops.kernels.machine import PTX

TERMS = 64  # rows of an expert at a time


class Tile(NamedTuple):
    """Rows and columns of a tile, and compile options."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


WIDE, NARROW = Tile(128, 256, 8, 4), Tile(128, 128, 4, 3)


@triton.jit
def add_outer_kernel(
    dy,
    x,
    total,
    dy_at,
    x_at,
    ends,
    N,
    K,
    down,
    FIRST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ENGINE: tl.constexpr,
):
    """Set a tile of an expert's total, fp32 `[E N, K]`, to that of dy^T x where it is FIRST, else add it: over the
    expert's rows of dy `[M, N]` and x `[M, K]`. These are descriptors, and `.._at` where they lie; N is `down` BM."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    row, column = tile % down * BM, tile // down * BN
    begin = tl.load(ends + expert - 1, expert > 0, 0)
    end = tl.load(ends + expert)
    made = tl.zeros((BM, BN), tl.float32)
    whole = begin + (end - begin) // BK * BK
    for m in range(begin, whole, BK):
        made = tl.dot(dy.load([m, row]).T, x.load([m, column]), made)
    if whole < end:
        last = (whole + tl.arange(0, BK)).to(tl.int64)[:, None]
        left = tl.load(dy_at + last * N + (row + tl.arange(0, BM))[None, :], last < end, 0.0)
        right = tl.load(x_at + last * K + (column + tl.arange(0, BN))[None, :], last < end, 0.0)
        made = tl.dot(left.T, right, made)
    made = made.to(x_at.dtype.element_ty).to(tl.float32)
    above = expert * N + row
    if FIRST:
        total.store([above, column], made)
    elif ENGINE:
        total.atomic_add([above, column], made)
    else:
        total.store([above, column], total.load([above, column]) + made)


def serves(height: int, width: int) -> bool:
    """Return whether matrices of this shape are whole tiles."""
    return height % NARROW.BM == width % NARROW.BN == 0


def add_outer(dy: Tensor, x: Tensor, ends: Tensor, total: Tensor, first: bool) -> None:
    """Set total, contiguous fp32 `[E, N, K]`, to the products of experts' rows of dy `[M, N]` and x `[M, K]`, or add
    them."""
    dy, x = dy.contiguous(), x.contiguous()
    height, width = dy.shape[1], x.shape[1]
    tile = WIDE if width % WIDE.BN == 0 else NARROW
    down = height // tile.BM
    add_outer_kernel[(down * (width // tile.BN), len(ends))](
        described(dy, TERMS, tile.BM),
        described(x, TERMS, tile.BN),
        described(total.view(-1, width), *tile[:2]),
        dy,
        x,
        ends,
        height,
        width,
        down,
        FIRST=first,
        BM=tile.BM,
        BN=tile.BN,
        BK=TERMS,
        ENGINE=PTX.value,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
