"""Tiles of `flash_kernels`: which a program computes and reads, and how it loads and stores. Needs Triton.

Names of shapes and options are those of the kernels.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3e38)  # below every score, yet finite: a tile may hide all its columns from a query
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_sums(sinks, head, BLOCK_M: tl.constexpr):
    """Return the running sum and maximum `[BLOCK_M]` before the first column: those of the head's sink, a column
    without a value, where there are sinks `[N]`, scores being in base 2."""
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    if sinks is not None:
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
    return total, top


@triton.jit
def long(stride, LONG: tl.constexpr):
    """Return the stride in 64 bits where LONG."""
    return stride.to(tl.int64) if LONG else stride


@triton.jit
def load(base, rows, stride, T, D: tl.constexpr, WIDTH: tl.constexpr, BOUND: tl.constexpr):
    """Load rows of D elements, `[R, WIDTH]`: zeros beyond D and, where BOUND, in rows from T on."""
    columns = tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if BOUND or D != WIDTH:
        return tl.load(pointers, mask=(rows[:, None] < T) & (columns[None, :] < D), other=0.0)
    return tl.load(pointers)


@triton.jit
def store(base, rows, stride, value, T, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=(rows[:, None] < T) & (columns[None, :] < D))


@triton.jit
def load_pairs(base, rows, T, BOUND: tl.constexpr):
    """Load two tensors `[R]` from `[T, 2]`, zeros from T on where BOUND. Both come in one load, since a load of fewer
    elements than threads would be repeated by every thread that needs them."""
    pointers = base + 2 * rows[:, None] + tl.arange(0, 2)[None, :]
    if BOUND:
        return tl.split(tl.load(pointers, mask=rows[:, None] < T, other=0))
    return tl.split(tl.load(pointers))


@triton.jit
def sum_products(o, g, lse, sums, place, rows, T, rescale):
    """Return (lse, sum of o * g over D less the factor `rescale`) of these rows, and write both to `[B, N, T, 2]`."""
    level = tl.load(lse + place * T + rows, mask=rows < T, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1) / rescale
    pairs = sums + 2 * (place * T + rows)
    tl.store(pairs, level, mask=rows < T)
    tl.store(pairs + 1, delta, mask=rows < T)
    return level, delta


@triton.jit
def program_tile(tiles, places, BAND: tl.constexpr):
    """Return (tile, index of sample and head in B N) for this program. Bands of heads, small enough for the L2 cache,
    run one after the other; in a band, tiles are ordered over all its heads, so that the longest run first."""
    program = tl.program_id(0)
    band = program // (tiles * BAND)
    size = tl.minimum(places - band * BAND, BAND)
    inside = program - band * BAND * tiles
    return inside // size, band * BAND + inside % size


@triton.jit
def seen(scores, rows, starts, columns, DIAGONAL: tl.constexpr, SPANS: tl.constexpr, hidden: tl.constexpr):
    """Return scores, or `hidden` where a query at the position `rows` may not attend to a column."""
    if DIAGONAL:
        scores = tl.where(rows[:, None] >= columns[None, :], scores, hidden)
    if SPANS:
        scores = tl.where(starts[:, None] <= columns[None, :], scores, hidden)
    return scores


@triton.jit
def seen_columns(spans, begin, middle, T, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first column tile that any query of this tile sees, first that all of them see), at most `middle`."""
    first = tl.load(spans + 2 * begin)
    last = tl.load(spans + 2 * (tl.minimum(begin + BLOCK_M, T) - 1))
    return first // BLOCK_N * BLOCK_N, tl.minimum(tl.cdiv(last, BLOCK_N) * BLOCK_N, middle)
