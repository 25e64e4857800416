"""Triton kernels of `flash`. Needs Triton.

Scores are in base 2: exp(s / sqrt(D)) = exp2(s c) with c = log2(e) / sqrt(D), one multiply-add and one exponential per
element. A program computes a tile of queries (forward, dq) or of keys (dk and dv) of one head. It goes over the tiles
on its side of the diagonal and compares indices only in those on the diagonal. With document bounds (SPANS) it skips
the tiles outside of its documents, and compares indices also in those on the edge of a document. No program adds to
another's result, so that gradients are the same in every run. `forward_kernel` and `keys_kernel` take the last samples
first, which the kernel before them wrote or read last and the L2 cache still holds.

q is `[B, T, N, D]`, k and v are `[B, S, N / GROUP, D]` with common strides. The last dimension is dense; q_b, q_t, q_n
and the like are strides of the others. v is None where it starts D elements after k, as in packed tensors: both then
share their addresses. Query i has the position i + S - T; earlier is S - T, or None for 0. out and grad are contiguous.

A tile has BLOCK_M queries or BLOCK_N keys; BLOCK_N is WORD where DROP, and in `keys_kernel` BLOCK_M divides BLOCK_N.
The D elements of a head are padded to WIDTH, a power of two. BOUND: tiles do not divide T or S. LONG: strides of rows
are multiplied in 64 bits. spans: int32 `[B, S, 2]`, bounds [first, end) of the document of each position. rescale: the
inverse of the share that dropout keeps.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.attention.flash_mask import WORD, first_word, first_word_of_columns, kept, zero_dropped
from dtgpt.ops.kernels.attention.flash_tiles import (
    first_sums,
    load,
    load_pairs,
    long,
    program_tile,
    seen,
    seen_columns,
    store,
    sum_products,
)


@triton.jit
def forward_tiles(
    acc, total, top, q, k_base, v_base, words, rows, starts, begin, clear, middle, end, stride, T, S, c,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, SPANS: tl.constexpr,
    BOUND: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """DIAGONAL: all of these tiles are on the diagonal. SPANS: those before `clear` and from `middle` on hide columns,
    in one loop, so that its pipeline fills once."""
    for first in range(begin, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        k = load(k_base, columns, stride, S, D, WIDTH, BOUND and (DIAGONAL or SPANS))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SPANS:
            if (first < clear) | (first >= middle):
                scores = seen(scores, rows + (S - T), starts, columns, True, True, float("-inf"))
        else:
            scores = seen(scores, rows + (S - T), starts, columns, DIAGONAL, False, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * c)
        p = tl.math.exp2(scores * c - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        top = higher
        v = load(v_base, columns, stride, S, D, WIDTH, BOUND and (DIAGONAL or SPANS))
        p = p.to(v.dtype)
        if DROP:
            low, high = load_pairs(words + 2 * first_word(first // WORD, T, S), rows, T, BOUND)
            p = zero_dropped(p, low[:, None], high[:, None], tl.arange(0, BLOCK_N)[None, :])
        acc = tl.dot(p, v, acc, input_precision="ieee")
    return acc, total, top


@triton.jit(do_not_specialize=["places"])
def forward_kernel(
    q, k, v, out, lse, sinks, words, spans, q_b, q_t, q_n, k_b, k_t, k_n, T, earlier, N, count, places, c, rescale,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, LONG: tl.constexpr, BOUND: tl.constexpr, DROP: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute out and lse, the binary logarithm of the sum of exponentials. sinks: `[N]` or None. Grid (ceil(T /
    BLOCK_M) B N)."""
    S = T if earlier is None else T + earlier
    q_t, k_t = long(q_t, LONG), long(k_t, LONG)
    tiles = tl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    place = places - 1 - place
    sample, head = (place // N).to(tl.int64), place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    middle, end = (begin + S - T) // BLOCK_N * BLOCK_N, tl.minimum(begin + BLOCK_M, T) + S - T
    rows = begin + tl.arange(0, BLOCK_M)
    if v is None:
        v = k + D
    k += sample * k_b + head // GROUP * k_n
    v += sample * k_b + head // GROUP * k_n
    if DROP:
        words += place.to(tl.int64) * 2 * count
    q = load(q + sample * q_b + head * q_n, rows, q_t, T, D, WIDTH, BOUND)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    total, top = first_sums(sinks, head, BLOCK_M)
    if SPANS:
        spans += sample * 2 * S + 2 * (S - T)
        first, clear = seen_columns(spans, begin, middle, T, BLOCK_M, BLOCK_N)
        starts, _ = load_pairs(spans, rows, T, BOUND)
        acc, total, top = forward_tiles(
            acc, total, top, q, k, v, words, rows, starts, first, clear, middle, end, k_t, T, S, c,
            D, WIDTH, BLOCK_N, False, True, BOUND, DROP,
        )  # fmt: skip
    else:
        acc, total, top = forward_tiles(
            acc, total, top, q, k, v, words, rows, rows, 0, 0, 0, middle, k_t, T, S, c,
            D, WIDTH, BLOCK_N, False, False, BOUND, DROP,
        )  # fmt: skip
        acc, total, top = forward_tiles(
            acc, total, top, q, k, v, words, rows, rows, middle, 0, 0, end, k_t, T, S, c,
            D, WIDTH, BLOCK_N, True, False, BOUND, DROP,
        )  # fmt: skip
    tl.store(lse + place * T + rows, top + tl.math.log2(total), mask=rows < T)
    store(out + sample * T * N * D + head * D, rows, N * D, acc * (rescale / total)[:, None], T, D, WIDTH)


@triton.jit
def _key_tiles(
    dk, dv, k, v, q_base, grad_base, words, sums, columns, ends, begin, end, stride, grad_stride, T, S, c,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
    SPANS: tl.constexpr, BOUND: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Add the queries begin ... end to dk and dv, in transposed tiles `[keys, queries]`: these are the left operands of
    both products, which the tensor cores read from registers."""
    for first in range(begin, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        q = load(q_base, rows, stride, T, D, WIDTH, BOUND)
        level, delta = load_pairs(sums, rows, T, BOUND)
        g = load(grad_base, rows, grad_stride, T, D, WIDTH, BOUND)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(g), input_precision="ieee")
        p = tl.math.exp2(scores * c - level[None, :])
        if DIAGONAL:
            p = tl.where((rows + (S - T))[None, :] >= columns[:, None], p, 0.0)
        if SPANS:
            p = tl.where(rows[None, :] < ends[:, None], p, 0.0)
        survived = p
        if DROP:
            low, high = load_pairs(words + 2 * first_word_of_columns(first // WORD, T, S), columns, S, BOUND)
            lanes = tl.arange(0, BLOCK_M)
            if BLOCK_M < WORD:
                lanes += first - first // WORD * WORD
            survived = tl.where(kept(low[:, None], high[:, None], lanes[None, :]), p, 0.0)
        dv = tl.dot(survived.to(g.dtype), g, dv, input_precision="ieee")
        ds = survived * dp - p * delta[None, :]
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["places"])
def keys_kernel(
    q, k, v, grad, sums, dk, dv, words, spans, q_b, q_t, q_n, k_b, k_t, k_n, d_b, d_t, d_n,
    T, earlier, N, count, places, c, rescale, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, LONG: tl.constexpr, BOUND: tl.constexpr, DROP: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, of strides d_b, d_t, d_n, from the sums of `queries_kernel`. Grid (ceil(S / BLOCK_N) B N /
    GROUP)."""
    S = T if earlier is None else T + earlier
    q_t, k_t, grad_t = long(q_t, LONG), long(k_t, LONG), long(N * D, LONG)
    tile, place = program_tile(tl.cdiv(S, BLOCK_N), places, BAND)
    place = places - 1 - place
    sample, head = (place // (N // GROUP)).to(tl.int64), place % (N // GROUP)
    begin = tile * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    if v is None:
        v = k + D
    k_tile = load(k + sample * k_b + head * k_n, columns, k_t, S, D, WIDTH, BOUND)
    v_tile = load(v + sample * k_b + head * k_n, columns, k_t, S, D, WIDTH, BOUND)
    dk_tile = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    # Of the queries that see this tile, those up to `middle` may see a part of it.
    first = tl.maximum(begin + T - S, 0) // BLOCK_M * BLOCK_M
    after = tl.cdiv(tl.maximum(begin + BLOCK_N + T - S, 0), BLOCK_M) * BLOCK_M
    middle = tl.minimum(after, T)
    clear, ends = T, columns
    if SPANS:
        spans += sample * 2 * S
        _, ends = load_pairs(spans, columns, S, BOUND)
        ends += T - S
        clear = tl.maximum((tl.load(spans + 2 * begin + 1) + T - S) // BLOCK_M * BLOCK_M, after)
    for member in range(GROUP):
        query_place = place * GROUP + member  # in B N
        q_base = q + sample * q_b + (head * GROUP + member) * q_n
        g_base = grad + sample * T * grad_t + (head * GROUP + member) * D
        pairs = sums + query_place * 2 * T
        bits = words
        if DROP:
            bits = words + query_place.to(tl.int64) * 2 * count
        dk_tile, dv_tile = _key_tiles(
            dk_tile, dv_tile, k_tile, v_tile, q_base, g_base, bits, pairs, columns, ends, first, middle, q_t, grad_t,
            T, S, c, D, WIDTH, BLOCK_M, BLOCK_N, True, SPANS, BOUND, DROP,
        )  # fmt: skip
        dk_tile, dv_tile = _key_tiles(
            dk_tile, dv_tile, k_tile, v_tile, q_base, g_base, bits, pairs, columns, ends, after, clear, q_t, grad_t,
            T, S, c, D, WIDTH, BLOCK_M, BLOCK_N, False, False, BOUND, DROP,
        )  # fmt: skip
        if SPANS:
            end = tl.load(spans + 2 * (tl.minimum(begin + BLOCK_N, S) - 1) + 1) + T - S
            dk_tile, dv_tile = _key_tiles(
                dk_tile, dv_tile, k_tile, v_tile, q_base, g_base, bits, pairs, columns, ends, clear, end, q_t, grad_t,
                T, S, c, D, WIDTH, BLOCK_M, BLOCK_N, False, True, BOUND, DROP,
            )  # fmt: skip
    store(dk + sample * d_b + head * d_n, columns, d_t, dk_tile * (scale * rescale), S, D, WIDTH)
    store(dv + sample * d_b + head * d_n, columns, d_t, dv_tile * rescale, S, D, WIDTH)


@triton.jit
def _query_tiles(
    dq, q, g, k_base, v_base, words, level, delta, rows, starts, begin, clear, middle, end, stride, T, S, c,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, SPANS: tl.constexpr,
    BOUND: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """DIAGONAL, SPANS: as of `forward_tiles`."""
    for first in range(begin, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        k = load(k_base, columns, stride, S, D, WIDTH, BOUND and (DIAGONAL or SPANS))
        v = load(v_base, columns, stride, S, D, WIDTH, BOUND and (DIAGONAL or SPANS))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(g, tl.trans(v), input_precision="ieee")
        p = tl.math.exp2(scores * c - level[:, None])
        if SPANS:
            if (first < clear) | (first >= middle):
                p = seen(p, rows + (S - T), starts, columns, True, True, 0.0)
        else:
            p = seen(p, rows + (S - T), starts, columns, DIAGONAL, False, 0.0)
        if DROP:
            low, high = load_pairs(words + 2 * first_word(first // WORD, T, S), rows, T, BOUND)
            dp = tl.where(kept(low[:, None], high[:, None], tl.arange(0, BLOCK_N)[None, :]), dp, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["places"])
def queries_kernel(
    q, k, v, out, grad, lse, sums, dq, words, spans, q_b, q_t, q_n, k_b, k_t, k_n, d_b, d_t, d_n,
    T, earlier, N, count, places, c, rescale, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, LONG: tl.constexpr, BOUND: tl.constexpr, DROP: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Compute dq, of strides d_b, d_t, d_n, and sums `[B, N, T, 2]` for `keys_kernel`: lse, and the sum of out * grad
    over D, without the factor `rescale` that both kernels omit from products with grad. Grid (ceil(T / BLOCK_M) B N).
    """
    S = T if earlier is None else T + earlier
    q_t, k_t, grad_t = long(q_t, LONG), long(k_t, LONG), long(N * D, LONG)
    tiles = tl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = (place // N).to(tl.int64), place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    middle, end = (begin + S - T) // BLOCK_N * BLOCK_N, tl.minimum(begin + BLOCK_M, T) + S - T
    rows = begin + tl.arange(0, BLOCK_M)
    if v is None:
        v = k + D
    k += sample * k_b + head // GROUP * k_n
    v += sample * k_b + head // GROUP * k_n
    if DROP:
        words += place.to(tl.int64) * 2 * count
    q = load(q + sample * q_b + head * q_n, rows, q_t, T, D, WIDTH, BOUND)
    base = sample * T * grad_t + head * D
    g = load(grad + base, rows, grad_t, T, D, WIDTH, BOUND)
    level, delta = sum_products(
        load(out + base, rows, grad_t, T, D, WIDTH, BOUND), g, lse, sums, place, rows, T, rescale
    )
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if SPANS:
        spans += sample * 2 * S + 2 * (S - T)
        first, clear = seen_columns(spans, begin, middle, T, BLOCK_M, BLOCK_N)
        starts, _ = load_pairs(spans, rows, T, BOUND)
        total = _query_tiles(
            total, q, g, k, v, words, level, delta, rows, starts, first, clear, middle, end, k_t, T, S, c,
            D, WIDTH, BLOCK_N, False, True, BOUND, DROP,
        )  # fmt: skip
    else:
        total = _query_tiles(
            total, q, g, k, v, words, level, delta, rows, rows, 0, 0, 0, middle, k_t, T, S, c,
            D, WIDTH, BLOCK_N, False, False, BOUND, DROP,
        )  # fmt: skip
        total = _query_tiles(
            total, q, g, k, v, words, level, delta, rows, rows, middle, 0, 0, end, k_t, T, S, c,
            D, WIDTH, BLOCK_N, True, False, BOUND, DROP,
        )  # fmt: skip
    store(dq + sample * d_b + head * d_n, rows, d_t, total * (scale * rescale), T, D, WIDTH)
