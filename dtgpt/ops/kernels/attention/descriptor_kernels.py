"""Triton kernels of `flash` that read tiles through tensor descriptors. Needs Triton.

They compute what `flash_kernels` does without dropout and with S = T, for 16-bit heads on GPUs whose copy engine (TMA)
moves whole tiles. Threads then hold no addresses, which leaves registers for larger tiles and deeper pipelines.
The engine reads zeros beyond T: such queries add nothing to dk and dv, and no query sees such keys.

q and grad are descriptors of `[B, N, T, D]`, k and v of `[B, N / GROUP, T, D]`; sums, sinks, spans, c, scale and the
strides d_b, d_t, d_n are those of `flash_kernels`. lse, out, dq, dk and dv are pointers. D is a power of two.
BOUND: tiles do not divide T.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.attention.flash_tiles import (
    first_sums,
    load,
    load_pairs,
    program_tile,
    seen,
    seen_columns,
    store,
    sum_products,
)


@triton.jit
def tile_of(source, sample, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Load the rows from `first` on of a head, `[ROWS, D]`."""
    return source.load([sample, head, first, 0]).reshape(ROWS, D)


@triton.jit
def _forward_tiles(
    acc, total, top, q, k, v, sample, head, rows, starts, begin, clear, middle, end, c,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """DIAGONAL: all of these tiles are on the diagonal. SPANS: those before `clear` and from `middle` on hide columns,
    in one loop, so that its pipeline fills once."""
    for first in range(begin, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        scores = tl.dot(q, tile_of(k, sample, head, first, BLOCK_N, D).T, input_precision="ieee")
        if SPANS:
            if (first < clear) | (first >= middle):
                scores = seen(scores, rows, starts, columns, True, True, float("-inf"))
        else:
            scores = seen(scores, rows, starts, columns, DIAGONAL, False, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * c)
        p = tl.math.exp2(scores * c - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        top = higher
        v_tile = tile_of(v, sample, head, first, BLOCK_N, D)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, total, top


@triton.jit(do_not_specialize=["places"])
def forward_by_tiles(
    q, k, v, out, lse, sinks, spans, d_b, d_t, d_n, T, N, places, c,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, BOUND: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute out and lse, the binary logarithm of the sum of exponentials. Grid (ceil(T / BLOCK_M) B N)."""
    tiles = tl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = place // N, place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    middle, end = begin // BLOCK_N * BLOCK_N, tl.minimum(begin + BLOCK_M, T)
    rows = begin + tl.arange(0, BLOCK_M)
    q_tile = tile_of(q, sample, head, begin, BLOCK_M, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    total, top = first_sums(sinks, head, BLOCK_M)
    group = head // GROUP
    if SPANS:
        spans += sample.to(tl.int64) * 2 * T
        first, clear = seen_columns(spans, begin, middle, T, BLOCK_M, BLOCK_N)
        starts, _ = load_pairs(spans, rows, T, BOUND)
        acc, total, top = _forward_tiles(
            acc, total, top, q_tile, k, v, sample, group, rows, starts, first, clear, middle, end, c,
            D, BLOCK_N, False, True,
        )  # fmt: skip
    else:
        acc, total, top = _forward_tiles(
            acc, total, top, q_tile, k, v, sample, group, rows, rows, 0, 0, 0, middle, c, D, BLOCK_N, False, False
        )
        acc, total, top = _forward_tiles(
            acc, total, top, q_tile, k, v, sample, group, rows, rows, middle, 0, 0, end, c, D, BLOCK_N, True, False
        )
    tl.store(lse + place.to(tl.int64) * T + rows, top + tl.math.log2(total), mask=rows < T)
    store(out + sample.to(tl.int64) * d_b + head * d_n, rows, d_t, acc * (1.0 / total)[:, None], T, D, D)


@triton.jit(do_not_specialize=["places"])
def keys_by_tiles(
    q, k, v, grad, sums, dk, dv, spans, d_b, d_t, d_n, T, N, places, c, scale,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, BOUND: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, of strides d_b, d_t, d_n, from the sums of `queries_by_tiles`. Grid (ceil(T / BLOCK_N) B N /
    GROUP).

    Tiles are transposed, `[keys, queries]`: these are the left operands of two products, which the tensor cores read
    from registers. One loop goes over the queries of all heads that share the keys, so that its pipeline fills once.
    """
    tile, place = program_tile(tl.cdiv(T, BLOCK_N), places, BAND)
    sample, group = place // (N // GROUP), place % (N // GROUP)
    begin = tile * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    k_tile = tile_of(k, sample, group, begin, BLOCK_N, D)
    v_tile = tile_of(v, sample, group, begin, BLOCK_N, D)
    dk_tile = tl.zeros([BLOCK_N, D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, D], tl.float32)
    # The maximum tells the compiler that the first row is not negative.
    first, end, ends = tl.maximum(begin, 0) // BLOCK_M * BLOCK_M, T, columns
    if SPANS:
        spans += sample.to(tl.int64) * 2 * T
        _, ends = load_pairs(spans, columns, T, BOUND)
        end = tl.load(spans + 2 * (tl.minimum(begin + BLOCK_N, T) - 1) + 1)
    begin_of_head, head = first, group * GROUP
    for _ in range(tl.cdiv(end - first, BLOCK_M) * GROUP):
        rows = first + tl.arange(0, BLOCK_M)
        q_tile = tile_of(q, sample, head, first, BLOCK_M, D)
        level, delta = load_pairs(sums + (sample * N + head).to(tl.int64) * 2 * T, rows, T, BOUND)
        g_tile = tile_of(grad, sample, head, first, BLOCK_M, D)
        if D > 64:  # products begin with the sums to subtract, since registers could not hold these until then
            levels = tl.broadcast_to(level[None, :] * (-1.0 / c), [BLOCK_N, BLOCK_M])
            deltas = tl.broadcast_to(-delta[None, :], [BLOCK_N, BLOCK_M])
            scores = tl.dot(k_tile, q_tile.T, levels, input_precision="ieee")
            dp = tl.dot(v_tile, g_tile.T, deltas, input_precision="ieee")
            p = tl.math.exp2(scores * c)
        else:
            scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
            dp = tl.dot(v_tile, g_tile.T, input_precision="ieee") - delta[None, :]
            p = tl.math.exp2(scores * c - level[None, :])
        p = tl.where(rows[None, :] >= columns[:, None], p, 0.0)
        if SPANS:
            p = tl.where(rows[None, :] < ends[:, None], p, 0.0)
        dv_tile = tl.dot(p.to(g_tile.dtype), g_tile, dv_tile, input_precision="ieee")
        ds = p * dp  # of the scores
        dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")
        first += BLOCK_M
        last = first >= end
        head += last.to(tl.int32)
        first = tl.where(last, begin_of_head, first)
    place_of_head = sample.to(tl.int64) * d_b + group * d_n
    store(dk + place_of_head, columns, d_t, dk_tile * scale, T, D, D)
    store(dv + place_of_head, columns, d_t, dv_tile, T, D, D)


@triton.jit
def _query_tiles(
    dq, q, g, k, v, sample, head, level, delta, rows, starts, begin, clear, middle, end, c,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """DIAGONAL, SPANS: as of `_forward_tiles`."""
    for first in range(begin, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        k_tile = tile_of(k, sample, head, first, BLOCK_N, D)
        scores = tl.dot(q, k_tile.T, input_precision="ieee")
        dp = tl.dot(g, tile_of(v, sample, head, first, BLOCK_N, D).T, input_precision="ieee")
        p = tl.math.exp2(scores * c - level[:, None])
        if SPANS:
            if (first < clear) | (first >= middle):
                p = seen(p, rows, starts, columns, True, True, 0.0)
        else:
            p = seen(p, rows, starts, columns, DIAGONAL, False, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["places"])
def queries_by_tiles(
    q, k, v, grad, out, lse, sums, dq, spans, d_b, d_t, d_n, T, N, places, c, scale,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, BOUND: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute dq, of strides d_b, d_t, d_n, and the sums for `keys_by_tiles`. Grid (ceil(T / BLOCK_M) B N)."""
    tiles = tl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = place // N, place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    middle, end = begin // BLOCK_N * BLOCK_N, tl.minimum(begin + BLOCK_M, T)
    rows = begin + tl.arange(0, BLOCK_M)
    q_tile = tile_of(q, sample, head, begin, BLOCK_M, D)
    g_tile = tile_of(grad, sample, head, begin, BLOCK_M, D)
    o = load(out + sample.to(tl.int64) * T * N * D + head * D, rows.to(tl.int64), N * D, T, D, D, BOUND)
    level, delta = sum_products(o, g_tile, lse, sums, place.to(tl.int64), rows, T, 1.0)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    group = head // GROUP
    if SPANS:
        spans += sample.to(tl.int64) * 2 * T
        first, clear = seen_columns(spans, begin, middle, T, BLOCK_M, BLOCK_N)
        starts, _ = load_pairs(spans, rows, T, BOUND)
        total = _query_tiles(
            total, q_tile, g_tile, k, v, sample, group, level, delta, rows, starts, first, clear, middle, end, c,
            D, BLOCK_N, False, True,
        )  # fmt: skip
    else:
        total = _query_tiles(
            total, q_tile, g_tile, k, v, sample, group, level, delta, rows, rows, 0, 0, 0, middle, c,
            D, BLOCK_N, False, False,
        )  # fmt: skip
        total = _query_tiles(
            total, q_tile, g_tile, k, v, sample, group, level, delta, rows, rows, middle, 0, 0, end, c,
            D, BLOCK_N, True, False,
        )  # fmt: skip
    store(dq + sample.to(tl.int64) * d_b + head * d_n, rows, d_t, total * scale, T, D, D)
