"""Triton kernels of decode steps: norms and matrix products of a few rows. Needs Triton.

A row's result must not depend on the number of rows, whatever tile it is computed in. Therefore:

* A product is a sum over groups of 512 along K, each a sum over segments of 128, each a chain of tensor-core
  operations, all in ascending order; logits are one chain over all of K. Such a chain gives the same bits in tiles of
  any size, by mma and by wgmma.
* With EXACT all of K is one chain, which has the bits of cuBLAS's product where that does not split K, and each result
  is rounded where training's ops round it (`exact`).
* The mean and the variance of a row are sums in float64. Of 16-bit values these are exact for practical purposes, so
  that their order does not matter.

Where PDL is set (programmatic dependent launch, Hopper and newer), a kernel starts while its predecessor ends, and
reads what the predecessor wrote after `gdc_wait`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dtgpt.ops.kernels.gelu_kernels import cdf
from dtgpt.ops.kernels.swiglu_kernels import sigmoid

GROUP = tl.constexpr(512)
SEGMENT = tl.constexpr(128)
GELU_CUBE = tl.constexpr(0.7978845608028654 * 0.044715)
GELU_LINE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_EXPONENT = tl.constexpr(-2.8853900817779268)  # -2 log2(e)
SILU_EXPONENT = tl.constexpr(-1.4426950408889634)  # -log2(e)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def next_kernel(slots, token, position, tokens, positions):
    """Write the next token and its position of each slot, int64 `[M]`, from the state `[slots]`."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    tl.store(tokens + row, tl.load(token + slot))
    tl.store(positions + row, tl.load(position + slot))


@triton.jit
def embed_kernel(tokens, positions, table, places, out, H, BLOCK: tl.constexpr):
    """Write the sum of a token's and a position's row `[H]`; places None: the token's alone."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    token = tl.load(table + tl.load(tokens + row) * H + column, inside, 0.0).to(tl.float32)
    if places is not None:
        token += tl.load(places + tl.load(positions + row) * H + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * H + column, token.to(out.dtype.element_ty), inside)


@triton.jit
def norm_kernel(
    x,
    branch,
    branch_bias,
    weight,
    bias,
    total,
    out,
    rows,
    H,
    eps,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write total = x + (sum over the groups of `branch` + its bias), and out = LayerNorm(total), of one row; bias
    None: RMSNorm(total).

    x, total, out: `[M, H]`; branch: fp32 `[GROUPS, M, H]`. GROUPS 0: no branch, and `total` is not written.
    branch_bias None: the branch has none.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + column, inside, 0.0).to(tl.float32)
    begin(PDL)
    here = row * H + column
    value = tl.load(x + here, inside, 0.0)
    if GROUPS > 0:
        added = tl.load(branch + here, inside, 0.0)
        for group in tl.static_range(1, GROUPS):
            added += tl.load(branch + group * rows * H + here, inside, 0.0)
        if branch_bias is not None:
            added += tl.load(branch_bias + column, inside, 0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + here, value, inside)
    wide = value.to(tl.float64)
    if bias is None:
        rstd = (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)).to(tl.float32)
        normed = value.to(tl.float32) * rstd * w
    else:
        mean = tl.sum(wide, 0) / H
        variance = tl.maximum(tl.sum(wide * wide, 0) / H - mean * mean, 0.0)
        rstd = (1.0 / tl.sqrt(variance + eps)).to(tl.float32)
        normed = tl.fma((value.to(tl.float32) - mean.to(tl.float32)) * rstd, w, b)
    tl.store(out + here, normed.to(out.dtype.element_ty), inside)


@triton.jit
def gelu(t):
    u = t * tl.fma(t * t, GELU_CUBE, GELU_LINE)
    return tl.math.div_rn(t, 1.0 + tl.exp2(u * GELU_EXPONENT))


@triton.jit
def silu(t):
    return tl.math.div_rn(t, 1.0 + tl.exp2(t * SILU_EXPONENT))


@triton.jit
def load_tile(source, at, start, inside, row, TILES: tl.constexpr):
    """Load a tile of x or weight from column `start` on: where TILES by the copy engine, `[rows, BK]` from `row` on of
    the descriptor `source`; else from the pointers `at`."""
    return source.load([row, start]) if TILES else tl.load(at + start, inside, 0.0)


@triton.jit
def chain(
    given, first, last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr
):
    """Return the sum of the terms from `first` to `last` for a tile, fp32 `[BM, BN]`."""
    x, weight, x_at, w_at, row_inside, column_inside, row, column = given
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(first, last, BK):
        left = (start + k < last) | EVEN
        x_part = load_tile(x, x_at, start, row_inside & left[None, :], row, TILES)
        w_part = load_tile(weight, w_at, start, column_inside & left[:, None], column, TILES)
        total = tl.dot(x_part, w_part.T if TILES else w_part, total, input_precision="ieee")
    return total


@triton.jit
def node(
    given, first, size, COUNT: tl.constexpr, TYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the sum of COUNT pieces of so many terms from `first` on: of one as it is, of more in a tree whose nodes
    are rounded to TYPE."""
    if COUNT == 1:
        made = chain(given, first, first + size, BM, BN, BK, EVEN, TILES)
    else:
        half: tl.constexpr = COUNT // 2
        left = node(given, first, size, half, TYPE, BM, BN, BK, EVEN, TILES).to(TYPE)
        right = node(given, first + half * size, size, half, TYPE, BM, BN, BK, EVEN, TILES).to(TYPE)
        made = (left.to(tl.float32) + right.to(tl.float32)).to(TYPE)
    return made


@triton.jit
def product_kernel(
    x,
    weight,
    bias,
    out,
    keys,
    values,
    slots,
    positions,
    rows,
    columns,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EPILOGUE: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
    EXACT: tl.constexpr,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
    PIECES: tl.constexpr = 1,
):
    """Write x w^T for a tile of rows and columns, x `[M, K]`, weight `[N, K]`; where TILES both are descriptors.

    EPILOGUE: "groups" writes the sums of the program's EACH groups of K to out fp32 `[groups, M, N]`; "logits" one
    chain over all of K to out fp32 `[M, N]`; "plain" the sum with its bias, if any; "gelu" that through GELU; "swiglu"
    of each two columns, gate and up, silu(gate) * up to out `[M, N / 2]`; "qkv" the sum with its bias: queries to out,
    keys and values to the cache `[slots, N_kv, LENGTH, SIZE]` at the rows' slots and positions, int64 `[M]`. PARTS:
    heads in the columns of one head of k and v: those of its queries, k and v. EVEN: BN divides the columns and 128
    divides K, or each of its PIECES, which EXACT sums in a tree.
    """
    tile = tl.program_id(1)  # rows are the inner index: their programs share the weights in L2
    first_row, first_column = tl.program_id(0) * BM, tile * BN
    m = first_row + tl.arange(0, BM)
    n = first_column + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_inside, column_inside = (m < rows)[:, None], ((n < columns) | EVEN)[None, :]
    row = m.to(tl.int64)[:, None]
    x_at = x if TILES else x + row * K + k[None, :]
    w_at = weight if TILES else weight + n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    begin(PDL)
    if (EPILOGUE == "logits") | EXACT:
        given = x, weight, x_at, w_at, row_inside, column_inside, first_row, first_column
        total = node(given, 0, K // PIECES, PIECES, out.dtype.element_ty, BM, BN, BK, EVEN, TILES).to(tl.float32)
    else:
        group = tl.zeros((BM, BN), tl.float32)
        first = tl.program_id(2) * (GROUP * EACH)
        last = tl.minimum(K, first + GROUP * EACH) if EPILOGUE == "groups" else K
        for start in range(first, last, SEGMENT):
            segment = tl.zeros((BM, BN), tl.float32)
            for step in tl.static_range(0, SEGMENT, BK):
                left, at = (start + step + k < K) | EVEN, start + step
                x_part = load_tile(x, x_at, at, row_inside & left[None, :], first_row, TILES)
                w_part = load_tile(weight, w_at, at, column_inside & left[:, None], first_column, TILES)
                segment = tl.dot(x_part, w_part.T if TILES else w_part, segment)
            group = tl.fma(segment, 1.0, group)  # the compiler would make one longer chain of a plain sum
            if EPILOGUE != "groups":
                if (start + SEGMENT) % GROUP == 0:
                    total += group
                    group = tl.zeros((BM, BN), tl.float32)
            elif EACH > 1:  # noqa: SIM102, since a condition must be either of constants or of values
                if ((start + SEGMENT) % GROUP == 0) & (start + SEGMENT < last):
                    done = out + (start // GROUP) * rows * columns + row * columns + n[None, :]
                    tl.store(done, group, row_inside & column_inside)
                    group = tl.zeros((BM, BN), tl.float32)
        total += group
    inside = row_inside & column_inside
    if EXACT & (EPILOGUE != "plain"):  # the activation is an op of its own in training
        total = total.to(out.dtype.element_ty).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, n < columns, 0.0).to(tl.float32)[None, :]
    if EPILOGUE == "groups":
        out += ((last - 1) // GROUP).to(tl.int64) * rows * columns
    elif EPILOGUE == "gelu":
        total = total * cdf(total) if EXACT else gelu(total)
    elif EPILOGUE == "swiglu":
        gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
        total = gate * sigmoid(gate) * up if EXACT else silu(gate) * up
        n, columns = tile * (BN // 2) + tl.arange(0, BN // 2), columns // 2
        inside = row_inside & ((n < columns) | EVEN)[None, :]
    made = total.to(out.dtype.element_ty)
    part = (tile * BN // SIZE) % PARTS if EPILOGUE == "qkv" else 0
    if EPILOGUE == "qkv" and part >= PARTS - 2:
        slot, position = tl.load(slots + m, m < rows, 0), tl.load(positions + m, m < rows, 0)
        heads, head = columns // (SIZE * PARTS), tile * BN // (SIZE * PARTS)
        cell = ((slot * heads + head) * LENGTH + position)[:, None] * SIZE + (n % SIZE)[None, :]
        tl.store((keys if part == PARTS - 2 else values) + cell, made, inside)
    else:
        tl.store(out + row * columns + n[None, :], made, inside)
