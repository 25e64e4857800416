"""A Triton kernel of products of experts' rows with their matrices, by whole tiles. Needs Triton, and on a GPU its copy
engine.

A program computes several tiles in one loop, so that the copy engine reads on while a tile ends: all that its places in
memory depend on stands under one condition, or Triton would not read ahead. K is one chain, as in other products. A
tile has rows of one expert; what the copy engine reads behind them is another expert's, and is not written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.descriptors import MOST_ROWS, described, described_rows
from dtgpt.ops.kernels.devices import multiprocessors
from dtgpt.ops.kernels.expert_kernels import find_rows
from dtgpt.ops.kernels.swiglu_kernels import sigmoid

TERMS = 64  # of K at a time
MOST = tl.constexpr(MOST_ROWS)


class Tile(NamedTuple):
    """Rows and columns of a tile, compile options, and the programs of a multiprocessor."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    programs: int
    parts: int


WIDE, NARROW = Tile(128, 256, 8, 4, 1, 2), Tile(128, 128, 4, 3, 2, 4)


@triton.jit
def store_parts(target, row, end, column, made, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """Write a tile `[BM, BN]`, in parts of its columns, where rows are before `end`. target: of `described_rows`."""
    if PARTS == 1:
        target.store([MOST, end, MOST - end + row, column], tl.reshape(made, (1, 1, BM, BN)))
    else:
        left, right = tl.split(tl.permute(tl.reshape(made, (BM, 2, BN // 2)), (0, 2, 1)))
        store_parts(target, row, end, column, left, BM, BN // 2, PARTS // 2)
        store_parts(target, row, end, column + BN // 2, right, BM, BN // 2, PARTS // 2)


@triton.jit
def tiles_kernel(ends, tiles, most, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Write what `find_rows` returns of each of `most` tiles to int32 `[most + 1, 4]`, and behind them how many tiles
    there are: many programs read it, and none searches."""
    tile = tl.program_id(0)
    expert, first, end = find_rows(ends, tile, E, EXPERTS, ROWS)
    tl.store(tiles + tile * 4, expert)
    tl.store(tiles + tile * 4 + 1, first)
    tl.store(tiles + tile * 4 + 2, end)
    if tile == 0:
        own = tl.arange(0, EXPERTS)
        rows = tl.load(ends + own, own < E, 0) - tl.load(ends + own - 1, (own > 0) & (own < E), 0)
        tl.store(tiles + most * 4, tl.sum(tl.where(own < E, (rows + ROWS - 1) // ROWS, 0), 0))


@triton.jit
def grouped_kernel(
    x,
    w,
    y,
    inner,
    tiles,
    most,
    across,
    steps,
    per_expert,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BY_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write tiles of y `[M, N]` from x `[M, K]` and a stack w, and to inner `[M, N / 2]` what SwiGLU makes of them;
    None: of nothing. x and w are descriptors; w has `per_expert` rows of each expert: `[E N, K]` where it is BY_ROWS,
    else `[E K, N]`. N is `across` BN, K `steps` BK; tiles: of `tiles_kernel`."""
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    own = (tl.load(tiles + most * 4) * across - tile + programs - 1) // programs
    total = tl.zeros((BM, BN), tl.float32)
    tile -= programs
    at = -1
    row = 0
    end = 0
    column = 0
    above = 0
    for _ in range(own * steps):
        at = tl.where(at == steps - 1, 0, at + 1)
        if at == 0:
            tile += programs
            place = tiles + tile // across * 4
            column = tile % across * BN
            above = tl.load(place) * per_expert
            row = tl.load(place + 1)
            end = tl.load(place + 2)
        k = at * BK
        w_part = w.load([above + column, k]).T if BY_ROWS else w.load([above + k, column])
        total = tl.dot(x.load([row, k]), w_part, total)
        if at == steps - 1:
            made = total.to(y.dtype)
            store_parts(y, row, end, column, made, BM, BN, PARTS)
            if inner is not None:
                gate, up = tl.split(tl.reshape(made.to(tl.float32), (BM, BN // 2, 2)))
                activated = (gate * sigmoid(gate) * up).to(y.dtype)
                store_parts(inner, row, end, column // 2, activated, BM, BN // 2, PARTS // 2)
            total = tl.zeros((BM, BN), tl.float32)


def serves(rows: int, weight: Tensor) -> bool:
    """Return whether products of so many rows with matrices `[E, N, K]` are whole tiles, of which few rows are lost."""
    count, columns, size = weight.shape
    by_rows = weight.is_contiguous()
    whole = columns % NARROW.BN == size % TERMS == 0 and (by_rows or weight.mT.is_contiguous())
    return whole and 2 * rows >= NARROW.BM * count


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, activate: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return x w^T `[M, N]` of x `[M, K]`, each row by the matrix of its expert of `[E, N, K]`, and SwiGLU of it."""
    x, by_rows = x.contiguous(), weight.is_contiguous()
    (rows, size), (count, columns, _) = x.shape, weight.shape
    tile = WIDE if columns % WIDE.BN == 0 else NARROW
    y, inner = x.new_empty(rows, columns), x.new_empty(rows, columns // 2) if activate else None
    most, across = triton.cdiv(rows, tile.BM) + count, columns // tile.BN
    tiles = torch.empty(most + 1, 4, dtype=torch.int32, device=x.device)
    experts = max(2, triton.next_power_of_2(count))
    tiles_kernel[(most,)](ends, tiles, most, E=count, EXPERTS=experts, ROWS=tile.BM, num_warps=1)
    part = tile.BM, tile.BN // tile.parts
    flat = (weight if by_rows else weight.mT).view(-1, size if by_rows else columns)
    grouped_kernel[(min(multiprocessors(x.device) * tile.programs, most * across),)](
        described(x, tile.BM, TERMS),
        described(flat, *(tile.BN, TERMS) if by_rows else (TERMS, tile.BN)),
        described_rows(y, *part),
        None if inner is None else described_rows(inner, *part),
        tiles,
        most,
        across,
        size // TERMS,
        columns if by_rows else size,
        BM=tile.BM,
        BN=tile.BN,
        BK=TERMS,
        BY_ROWS=by_rows,
        PARTS=tile.parts,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y, inner
