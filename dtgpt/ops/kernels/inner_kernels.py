"""A Triton kernel of the first products of experts: it reads each row where its token lies, applies SwiGLU to what it
has, and writes the rows for backward beside it. Needs Triton, and on a GPU its copy engine.

A pass that only gathers would read and write what the product reads again; here the rows that a program copies come
from the cache, while another program on the same multiprocessor multiplies. K is one chain, as in other products.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dtgpt.ops.kernels.expert_kernels import find_rows
from dtgpt.ops.kernels.swiglu_kernels import sigmoid

PIECE = 128  # columns of rows that are copied at a time


class Tile(NamedTuple):
    """Tile sizes and compile options."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


TILE = Tile(128, 128, 64, 4, 3)


@triton.jit
def tiles_kernel(ends, tiles, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Write what `find_rows` returns of each tile to int32 `[.., 4]`: many programs read it, and none searches."""
    place = tiles + tl.program_id(0) * 4
    expert, first, end = find_rows(ends, tl.program_id(0), E, EXPERTS, ROWS)
    tl.store(place, expert)
    tl.store(place + 1, first)
    tl.store(place + 2, end)


@triton.jit
def inner_kernel(
    x, tokens, weight, tiles, rows, pairs, inner, across, K, N,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COPIED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write a tile of pairs `[M, N]`, of what SwiGLU makes of it to inner `[M, N / 2]`, and a part of its rows `[M, K]`
    of x `[.., K]`: COPIED of them. weight: a descriptor of `[E N, K]`; tiles: of `tiles_kernel`."""
    place, part = tiles + tl.program_id(0) // across * 4, tl.program_id(0) % across
    expert, first, end = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    if expert < E:
        column = part * BN
        row = (first + tl.arange(0, BM)).to(tl.int64)
        inside = (row < end)[:, None]
        at = x + tl.load(tokens + row, row < end, 0)[:, None] * K + tl.arange(0, BK)[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(tl.load(at + k), weight.load([expert * N + column, k]).T, total)
        made = total.to(pairs.dtype.element_ty)
        tl.store(pairs + row[:, None] * N + (column + tl.arange(0, BN))[None, :], made, inside)
        gate, up = tl.split(tl.reshape(made.to(tl.float32), (BM, BN // 2, 2)))
        here = inner + row[:, None] * (N // 2) + (column // 2 + tl.arange(0, BN // 2))[None, :]
        tl.store(here, (gate * sigmoid(gate) * up).to(inner.dtype.element_ty), inside)
        if rows is not None:
            own = tl.arange(0, COPIED) + part * COPIED
            copied = (first + own).to(tl.int64)
            known = (own < BM) & (copied < end)
            source = tl.load(tokens + copied, known, 0)[:, None] * K
            for k in range(0, K, PIECE):
                columns = (k + tl.arange(0, PIECE))[None, :]
                tl.store(rows + copied[:, None] * K + columns, tl.load(x + source + columns), known[:, None])


def serves(width: int, columns: int) -> bool:
    """Return whether matrices `[columns, width]` are whole tiles."""
    return width % PIECE == columns % TILE.BN == 0


def inner_of(
    x: Tensor, tokens: Tensor, weight: Tensor, ends: Tensor, keeps: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (rows `[M, H]` of x `[N, H]`, their products with the stack `[E, 2 F, H]`, SwiGLU of these). keeps:
    whether to write the rows; else there is None."""
    x, weight, tile = x.contiguous(), weight.contiguous(), TILE
    count, columns, width = weight.shape
    total, across = len(tokens), columns // tile.BN
    rows = x.new_empty(total, width) if keeps else None
    pairs, inner = x.new_empty(total, columns), x.new_empty(total, columns // 2)
    described = TensorDescriptor(weight, [count * columns, width], [width, 1], [tile.BN, tile.BK])
    most = triton.cdiv(total, tile.BM) + count
    tiles = torch.empty(most, 4, dtype=torch.int32, device=x.device)
    experts = max(2, triton.next_power_of_2(count))
    tiles_kernel[(most,)](ends, tiles, E=count, EXPERTS=experts, ROWS=tile.BM, num_warps=1)
    inner_kernel[(most * across,)](
        x, tokens, described, tiles, rows, pairs, inner, across, width, columns,
        E=count, BM=tile.BM, BN=tile.BN, BK=tile.BK,
        COPIED=triton.next_power_of_2(triton.cdiv(tile.BM, across)), PIECE=PIECE,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return rows, pairs, inner
