"""What adds up pieces of products of experts' rows on a GPU: as `kernels.tree_kernel`, in registers. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.descriptors import described
from dtgpt.ops.kernels.expert_kernels import find_rows
from dtgpt.parallel.exact_tp.products import operand
from dtgpt.parallel.exact_tp.tree import tree_sum

MOST = 8  # pieces of a program
BM, BN = 128, 128  # rows and columns of a tile
INNER = 64, 32  # terms of a step, the most that divide those of a piece


@triton.jit
def piece(
    x, w, row, column, above, start, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_INPUTS: tl.constexpr
):
    """Return the product of a piece for a tile, fp32 `[BM, BN]`. above: rows of w before the matrix of the expert."""
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(start, start + K, BK):
        w_part = w.load([above + column, k]).T if BY_INPUTS else w.load([above + k, column])
        total = tl.dot(x.load([row, k]), w_part, total)
    return total


@triton.jit
def node(
    x,
    w,
    row,
    column,
    above,
    start,
    K,
    COUNT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BY_INPUTS: tl.constexpr,
):
    """Return the sum of COUNT pieces from `start` on, in a tree whose nodes are rounded to the type of x."""
    if COUNT == 1:
        made = piece(x, w, row, column, above, start, K, BM, BN, BK, BY_INPUTS)
    else:
        right = start + COUNT // 2 * K
        one = node(x, w, row, column, above, start, K, COUNT // 2, BM, BN, BK, BY_INPUTS)
        other = node(x, w, row, column, above, right, K, COUNT // 2, BM, BN, BK, BY_INPUTS)
        made = one.to(tl.float32) + other.to(tl.float32)
    return made.to(x.dtype)


@triton.jit
def stack_tree_kernel(
    x,
    w,
    ends,
    out,
    K,
    COLUMNS: tl.constexpr,
    PER_EXPERT: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BY_INPUTS: tl.constexpr,
):
    """Write a tile of out `[M, COLUMNS]`: the sum of COUNT pieces of K each, of the rows of one expert of x
    `[M, COUNT K]` and its matrix, of w `[E PER_EXPERT, ..]`: `[COLUMNS, COUNT K]` where it is BY_INPUTS, else
    `[COUNT K, COLUMNS]`. x and w are descriptors."""
    across: tl.constexpr = (COLUMNS + BN - 1) // BN
    expert, row, end = find_rows(ends, tl.program_id(0) // across, E, EXPERTS, BM)
    if expert < E:
        column, above = tl.program_id(0) % across * BN, expert * PER_EXPERT
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        at = out + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        inside = (rows < end)[:, None] & (columns < COLUMNS)[None, :]
        if COUNT == 8:  # there are registers for two nodes that wait, and not for three
            tl.store(at, node(x, w, row, column, above, 0, K, 4, BM, BN, BK, BY_INPUTS), inside)
            right = node(x, w, row, column, above, 4 * K, K, 4, BM, BN, BK, BY_INPUTS)
            made = (tl.load(at, inside, 0.0).to(tl.float32) + right.to(tl.float32)).to(x.dtype)
        else:
            made = node(x, w, row, column, above, 0, K, COUNT, BM, BN, BK, BY_INPUTS)
        tl.store(at, made, inside)


def inner_of(terms: int) -> int:
    """Return the terms of a step through so many of a piece; 0: the kernel does not serve it."""
    return next((inner for inner in INNER if terms % inner == 0), 0)


def stack_tree(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> Tensor:
    """Return what `dtgpt.parallel.more_pieces.stacks.ADDENDS` does."""
    x, weight, parts = operand(x), operand(weight), max(1, count // MOST)
    pairs = zip(x.chunk(parts, 1), weight.chunk(parts, 2 if by_inputs else 1), strict=True)
    return tree_sum(_launch(part, operand(w), ends, count // parts, by_inputs) for part, w in pairs)


def _launch(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> Tensor:
    (rows, size), experts, per_expert = x.shape, *weight.shape[:2]
    columns, inner = per_expert if by_inputs else weight.shape[2], inner_of(size // count)
    out = x.new_empty(rows, columns)
    flat = weight.view(experts * per_expert, -1)
    block = [BN, inner] if by_inputs else [inner, BN]
    # Each expert may leave a tile unfilled.
    grid = ((triton.cdiv(rows, BM) + experts) * triton.cdiv(columns, BN),)
    stack_tree_kernel[grid](
        described(x, BM, inner),
        described(flat, *block),
        ends,
        out,
        size // count,
        COLUMNS=columns,
        PER_EXPERT=per_expert,
        E=experts,
        EXPERTS=max(2, triton.next_power_of_2(experts)),
        COUNT=count,
        BM=BM,
        BN=BN,
        BK=inner,
        BY_INPUTS=by_inputs,
        num_warps=8,
        num_stages=4,
    )
    return out
