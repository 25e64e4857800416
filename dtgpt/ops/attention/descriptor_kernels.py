"""Triton kernels of `dtgpt.ops.attention.flash` that read tiles through tensor descriptors. Needs Triton.

They compute what `flash_kernels` does without dropout, for 16-bit heads on GPUs whose copy engine (TMA) moves whole
tiles. Threads then hold no addresses, which leaves registers for tiles of 128 columns; rows beyond T or S and columns
beyond D are read as zeros.

q and grad are descriptors of `[B, N, T, D]`, k and v of `[B, N / GROUP, S, D]`; sums, spans, T, earlier, c, scale and
the strides d_b, d_t, d_n are those of `flash_kernels`. lse, out, dq, dk and dv are pointers. BOUND: tiles do not
divide T or S.
"""

import triton
import triton.language as tl

from dtgpt.ops.attention.flash_tiles import load_pairs, program_tile, seen_columns, store

LOWEST = tl.constexpr(-3e38)  # below every score, yet finite: a tile may hide all its columns from a query


@triton.jit
def tile_of(source, sample, head, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load the rows from `first` on of a head, `[ROWS, WIDTH]`."""
    return source.load([sample, head, first, 0]).reshape(ROWS, WIDTH)


@triton.jit
def seen(scores, rows, starts, columns, DIAGONAL: tl.constexpr, SPANS: tl.constexpr, hidden: tl.constexpr):
    """Return scores, or `hidden` where a query at the position `rows` may not attend to a column."""
    if DIAGONAL:
        scores = tl.where(rows[:, None] >= columns[None, :], scores, hidden)
    if SPANS:
        scores = tl.where(starts[:, None] <= columns[None, :], scores, hidden)
    return scores


@triton.jit
def _forward_tiles(
    acc, total, top, q, k, v, sample, head, rows, starts, begin, end, c,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        scores = tl.dot(q, tile_of(k, sample, head, first, BLOCK_N, WIDTH).T, input_precision="ieee")
        scores = seen(scores, rows, starts, columns, DIAGONAL, SPANS, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * c)
        p = tl.math.exp2(scores * c - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        top = higher
        v_tile = tile_of(v, sample, head, first, BLOCK_N, WIDTH)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, total, top


@triton.jit(do_not_specialize=["places"])
def forward_by_tiles(
    q, k, v, out, lse, spans, d_b, d_t, d_n, T, earlier, N, places, c,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, BOUND: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute out and lse, the binary logarithm of the sum of exponentials. Grid (ceil(T / BLOCK_M) B N)."""
    S = T if earlier is None else T + earlier
    tiles = tl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = place // N, place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    middle, end = (begin + S - T) // BLOCK_N * BLOCK_N, tl.minimum(begin + BLOCK_M, T) + S - T
    rows = begin + tl.arange(0, BLOCK_M)
    positions = rows + (S - T)
    q_tile = tile_of(q, sample, head, begin, BLOCK_M, WIDTH)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    group, clear, starts = head // GROUP, 0, rows
    if SPANS:
        spans += sample.to(tl.int64) * 2 * T
        first, clear = seen_columns(spans, begin, middle, T, BLOCK_M, BLOCK_N)
        starts, _ = load_pairs(spans, rows, T, BOUND)
        acc, total, top = _forward_tiles(
            acc, total, top, q_tile, k, v, sample, group, positions, starts, first, clear, c,
            WIDTH, BLOCK_N, False, True,
        )  # fmt: skip
    acc, total, top = _forward_tiles(
        acc, total, top, q_tile, k, v, sample, group, positions, starts, clear, middle, c, WIDTH, BLOCK_N, False, False
    )
    acc, total, top = _forward_tiles(
        acc, total, top, q_tile, k, v, sample, group, positions, starts, middle, end, c, WIDTH, BLOCK_N, True, SPANS
    )
    tl.store(lse + place.to(tl.int64) * T + rows, top + tl.math.log2(total), mask=rows < T)
    store(out + sample.to(tl.int64) * d_b + head * d_n, rows, d_t, acc * (1.0 / total)[:, None], T, D, WIDTH)


@triton.jit(do_not_specialize=["places"])
def keys_by_tiles(
    q, k, v, grad, sums, dk, dv, spans, d_b, d_t, d_n, T, earlier, N, places, c, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, BOUND: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, of strides d_b, d_t, d_n. Grid (ceil(S / BLOCK_N) B N / GROUP).

    Tiles are transposed, `[keys, queries]`: these are the left operands of two products, which the tensor cores read
    from registers. One loop goes over the queries of all heads that share the keys, so that its pipeline fills once.
    """
    S = T if earlier is None else T + earlier
    tile, place = program_tile(tl.cdiv(S, BLOCK_N), places, BAND)
    sample, group = place // (N // GROUP), place % (N // GROUP)
    begin = tile * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    k_tile = tile_of(k, sample, group, begin, BLOCK_N, WIDTH)
    v_tile = tile_of(v, sample, group, begin, BLOCK_N, WIDTH)
    dk_tile = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    first, end, ends = tl.maximum(begin + T - S, 0) // BLOCK_M * BLOCK_M, T, columns
    if SPANS:
        spans += sample.to(tl.int64) * 2 * T
        _, ends = load_pairs(spans, columns, T, BOUND)
        end = tl.load(spans + 2 * (tl.minimum(begin + BLOCK_N, T) - 1) + 1)
    begin_of_head, head = first, group * GROUP
    for _ in range(tl.cdiv(end - first, BLOCK_M) * GROUP):
        rows = first + tl.arange(0, BLOCK_M)
        q_tile = tile_of(q, sample, head, first, BLOCK_M, WIDTH)
        level, delta = load_pairs(sums + (sample * N + head).to(tl.int64) * 2 * T, rows, T, BOUND)
        g_tile = tile_of(grad, sample, head, first, BLOCK_M, WIDTH)
        if WIDTH > 64:  # products begin with the sums to subtract, since registers could not hold these until then
            levels = tl.broadcast_to(level[None, :] * (-1.0 / c), [BLOCK_N, BLOCK_M])
            deltas = tl.broadcast_to(-delta[None, :], [BLOCK_N, BLOCK_M])
            scores = tl.dot(k_tile, q_tile.T, levels, input_precision="ieee")
            dp = tl.dot(v_tile, g_tile.T, deltas, input_precision="ieee")
            p = tl.math.exp2(scores * c)
        else:
            scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
            dp = tl.dot(v_tile, g_tile.T, input_precision="ieee") - delta[None, :]
            p = tl.math.exp2(scores * c - level[None, :])
        p = tl.where((rows + (S - T))[None, :] >= columns[:, None], p, 0.0)
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
    store(dk + place_of_head, columns, d_t, dk_tile * scale, S, D, WIDTH)
    store(dv + place_of_head, columns, d_t, dv_tile, S, D, WIDTH)


@triton.jit
def _query_tiles(
    dq, q, g, k, v, sample, head, level, delta, rows, starts, begin, end, c,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        k_tile = tile_of(k, sample, head, first, BLOCK_N, WIDTH)
        scores = tl.dot(q, k_tile.T, input_precision="ieee")
        dp = tl.dot(g, tile_of(v, sample, head, first, BLOCK_N, WIDTH).T, input_precision="ieee")
        p = seen(tl.math.exp2(scores * c - level[:, None]), rows, starts, columns, DIAGONAL, SPANS, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["places"])
def queries_by_tiles(
    q, k, v, grad, sums, dq, spans, d_b, d_t, d_n, T, earlier, N, places, c, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, BOUND: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute dq, of strides d_b, d_t, d_n. Grid (ceil(T / BLOCK_M) B N)."""
    S = T if earlier is None else T + earlier
    tiles = tl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = place // N, place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    middle, end = (begin + S - T) // BLOCK_N * BLOCK_N, tl.minimum(begin + BLOCK_M, T) + S - T
    rows = begin + tl.arange(0, BLOCK_M)
    positions = rows + (S - T)
    q_tile = tile_of(q, sample, head, begin, BLOCK_M, WIDTH)
    g_tile = tile_of(grad, sample, head, begin, BLOCK_M, WIDTH)
    level, delta = load_pairs(sums + place.to(tl.int64) * 2 * T, rows, T, BOUND)
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    group, clear, starts = head // GROUP, 0, rows
    if SPANS:
        spans += sample.to(tl.int64) * 2 * T
        first, clear = seen_columns(spans, begin, middle, T, BLOCK_M, BLOCK_N)
        starts, _ = load_pairs(spans, rows, T, BOUND)
        total = _query_tiles(
            total, q_tile, g_tile, k, v, sample, group, level, delta, positions, starts, first, clear, c,
            WIDTH, BLOCK_N, False, True,
        )  # fmt: skip
    total = _query_tiles(
        total, q_tile, g_tile, k, v, sample, group, level, delta, positions, starts, clear, middle, c,
        WIDTH, BLOCK_N, False, False,
    )  # fmt: skip
    total = _query_tiles(
        total, q_tile, g_tile, k, v, sample, group, level, delta, positions, starts, middle, end, c,
        WIDTH, BLOCK_N, True, SPANS,
    )  # fmt: skip
    store(dq + sample.to(tl.int64) * d_b + head * d_n, rows, d_t, total * scale, T, D, WIDTH)
