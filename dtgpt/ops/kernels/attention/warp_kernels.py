"""Gluon kernels of `flash` whose warps have tasks of their own. Needs Triton and a Hopper GPU.

They compute what `descriptor_kernels` does, for heads of 128, with the same bits, since every sum has the same order.
One warp of a program loads tiles; each group of four warps computes a tile of its own. The groups share what is loaded:
k and v for 128 or 192 queries (forward) or 128 (dq), q and grad for 128 keys (dk and dv). Nothing holds the groups in
step, so that the tensor cores multiply for one while another computes exponentials; within a group, products of one
tile run beside the exponentials of the next. With document bounds, all groups go over the tiles that any of them sees:
those that are hidden from a group add zeros to its sums, which changes no bits.

Arguments are those of `descriptor_kernels`; descriptors are Gluon's, of boxes of ROWS. BLOCK_M (BLOCK_N in
`keys_by_warps`) are the rows of all groups of a program, STAGES the slots of a ring of `warp_tiles`. The copy engine
reads zeros beyond T: as there, such queries add nothing to dk and dv, and no query sees such keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from dtgpt.ops.kernels.attention.flash_tiles import LOG2_E, LOWEST, program_tile
from dtgpt.ops.kernels.attention.warp_tiles import (
    COLUMN,
    LEFT,
    ROW,
    ROWS,
    SCORES,
    STORED,
    SUMS,
    D,
    bounds_of_rows,
    columns_of,
    end_of_queries,
    free,
    hides,
    load_columns,
    load_pairs,
    load_queries,
    next_queries,
    products,
    put_pairs,
    ring_of,
    seen,
    store,
    tile_of,
    wait,
)


@gluon.jit
def _softmax(scores, total, top, c):
    """Return (probabilities of a tile, the factor for what was summed before, the sum and the maximum so far)."""
    higher = gl.maximum(top, gl.max(scores, 1) * c)
    p = gl.exp2(scores * c - higher[:, None])
    shrink = gl.exp2(top - higher)
    return p, shrink, total * shrink + gl.sum(p, 1), higher


@gluon.jit
def _forward_group(PART: gl.constexpr, own, k_ring, v_ring, out, lse, sinks, spans, begin, d_t, T, c):
    """Compute the tile PART of the queries from `begin` on. out, lse, sinks: of their head; spans: of their sample."""
    begin, low, count = columns_of(PART, spans, begin, T)
    starts, clear = None, None
    if spans is not None:
        starts, clear = bounds_of_rows(spans, begin, low, T)
    rows = begin + gl.arange(0, ROWS, layout=ROW)
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    total = gl.zeros([ROWS], gl.float32, ROW)
    top = gl.full([ROWS], LOWEST, gl.float32, ROW)
    if sinks is not None:
        top = total + gl.load(sinks).to(gl.float32) * LOG2_E
        total += 1.0
    q = tile_of(own, PART, 0)
    wait(own, PART)
    wait(k_ring, 0)
    scores = warpgroup_mma_wait(0, deps=[products(q, tile_of(k_ring, 0, 0))])
    free(k_ring, 0)
    p, _, total, top = _softmax(seen(scores, rows, starts, low * ROWS, float("-inf")), total, top, c)
    p = gl.convert_layout(p.to(q.dtype), LEFT)
    for i in range(count - 1):
        wait(k_ring, i + 1)
        scores = products(q, tile_of(k_ring, i + 1, 0))
        wait(v_ring, i)
        acc = warpgroup_mma(p, tile_of(v_ring, i, 0), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        free(k_ring, i + 1)
        if hides(i + 1, clear, count):
            scores = seen(scores, rows, starts, (low + i + 1) * ROWS, float("-inf"))
        next_p, shrink, total, top = _softmax(scores, total, top, c)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        free(v_ring, i)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(next_p.to(q.dtype), LEFT)
    wait(v_ring, count - 1)
    acc = warpgroup_mma(p, tile_of(v_ring, count - 1, 0), acc, is_async=True)
    gl.store(lse + rows, top + gl.log2(total), mask=rows < T)
    acc = warpgroup_mma_wait(0, deps=[acc])
    free(v_ring, count - 1)
    store(out, begin, d_t, acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None], T)


@gluon.jit(do_not_specialize=["places"])
def forward_by_warps(
    q, k, v, out, lse, sinks, spans, d_b, d_t, d_n, T, N, places, c,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute out and lse, the binary logarithm of the sum of exponentials. Grid (ceil(T / BLOCK_M) B N)."""
    PARTS: gl.constexpr = BLOCK_M // ROWS
    gl.static_assert((BLOCK_M == 2 * ROWS or BLOCK_M == 3 * ROWS) and BLOCK_N == ROWS)
    tiles = gl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = place // N, place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    own, k_ring, v_ring = ring_of(q, PARTS, 1, 1), ring_of(k, STAGES, PARTS, 1), ring_of(v, STAGES, PARTS, 1)
    fence_async_shared()
    out += sample.to(gl.int64) * d_b + head * d_n
    lse += place.to(gl.int64) * T
    if sinks is not None:
        sinks += head
    if spans is not None:
        spans += sample.to(gl.int64) * 2 * T
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_forward_group, (0, own, k_ring, v_ring, out, lse, sinks, spans, begin, d_t, T, c)),
                (_forward_group, (1, own, k_ring, v_ring, out, lse, sinks, spans, begin, d_t, T, c)),
                (load_columns, (own, k_ring, v_ring, (q,), k, v, spans, sample, head, head // GROUP, begin, T, 2)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_forward_group, (0, own, k_ring, v_ring, out, lse, sinks, spans, begin, d_t, T, c)),
                (_forward_group, (1, own, k_ring, v_ring, out, lse, sinks, spans, begin, d_t, T, c)),
                (_forward_group, (2, own, k_ring, v_ring, out, lse, sinks, spans, begin, d_t, T, c)),
                (load_columns, (own, k_ring, v_ring, (q,), k, v, spans, sample, head, head // GROUP, begin, T, 3)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _probabilities(scores, level, c, rows, starts, low, i, clear, count):
    """Return the probabilities of the tile of turn i, from the logarithms of their sums."""
    p = gl.exp2(scores * c - level[:, None])
    if hides(i, clear, count):
        p = seen(p, rows, starts, (low + i) * ROWS, 0.0)
    return p


@gluon.jit
def _queries_group(PART: gl.constexpr, own, k_ring, v_ring, out, lse, sums, dq, spans, begin, d_t, T, N, c, scale):
    """Compute the tile PART of the queries from `begin` on. out, lse, sums, dq: of their head; spans: of their
    sample."""
    begin, low, count = columns_of(PART, spans, begin, T)
    starts, clear = None, None
    if spans is not None:
        starts, clear = bounds_of_rows(spans, begin, low, T)
    r = begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, STORED))
    o = gl.load(out + r.to(gl.int64)[:, None] * (N * D) + d[None, :], mask=(r < T)[:, None], other=0.0)
    level = gl.load(lse + r, mask=r < T, other=0.0)
    q, g = tile_of(own, PART, 0), tile_of(own, PART, 1)
    wait(own, PART)
    delta = gl.sum(o.to(gl.float32) * g.load(STORED).to(gl.float32), 1)
    gl.store(sums + 2 * r, level, mask=r < T)
    gl.store(sums + 2 * r + 1, delta, mask=r < T)
    level, delta = gl.convert_layout(level, ROW), gl.convert_layout(delta, ROW)
    rows = begin + gl.arange(0, ROWS, layout=ROW)
    total = gl.zeros([ROWS, D], gl.float32, SUMS)
    wait(k_ring, 0)
    scores = products(q, tile_of(k_ring, 0, 0))
    wait(v_ring, 0)
    dp = products(g, tile_of(v_ring, 0, 0))
    scores, dp = warpgroup_mma_wait(0, deps=[scores, dp])
    free(v_ring, 0)
    p = _probabilities(scores, level, c, rows, starts, low, 0, clear, count)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(q.dtype), LEFT)
    for i in range(count - 1):
        wait(k_ring, i + 1)
        scores = products(q, tile_of(k_ring, i + 1, 0))
        wait(v_ring, i + 1)
        dp = products(g, tile_of(v_ring, i + 1, 0))
        total = warpgroup_mma(ds, tile_of(k_ring, i, 0), total, is_async=True)
        scores, dp = warpgroup_mma_wait(1, deps=[scores, dp])
        free(v_ring, i + 1)
        p = _probabilities(scores, level, c, rows, starts, low, i + 1, clear, count)
        next_ds = (p * (dp - delta[:, None])).to(q.dtype)
        total, ds = warpgroup_mma_wait(0, deps=[total, ds])
        free(k_ring, i)
        ds = gl.convert_layout(next_ds, LEFT)
    total = warpgroup_mma(ds, tile_of(k_ring, count - 1, 0), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    free(k_ring, count - 1)
    store(dq, begin, d_t, total * scale, T)


@gluon.jit(do_not_specialize=["places"])
def queries_by_warps(
    q, k, v, grad, out, lse, sums, dq, spans, d_b, d_t, d_n, T, N, places, c, scale,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dq, of strides d_b, d_t, d_n, and the sums for `keys_by_warps`. Grid (ceil(T / BLOCK_M) B N)."""
    gl.static_assert(BLOCK_M == 2 * ROWS and BLOCK_N == ROWS)
    tiles = gl.cdiv(T, BLOCK_M)
    tile, place = program_tile(tiles, places, BAND)
    sample, head = place // N, place % N
    begin = (tiles - 1 - tile) * BLOCK_M
    own, k_ring, v_ring = ring_of(q, 2, 1, 2), ring_of(k, STAGES, 2, 1), ring_of(v, STAGES, 2, 1)
    fence_async_shared()
    out += sample.to(gl.int64) * T * (N * D) + head * D
    lse += place.to(gl.int64) * T
    sums += place.to(gl.int64) * 2 * T
    dq += sample.to(gl.int64) * d_b + head * d_n
    if spans is not None:
        spans += sample.to(gl.int64) * 2 * T
    gl.warp_specialize(
        [
            (_queries_group, (0, own, k_ring, v_ring, out, lse, sums, dq, spans, begin, d_t, T, N, c, scale)),
            (_queries_group, (1, own, k_ring, v_ring, out, lse, sums, dq, spans, begin, d_t, T, N, c, scale)),
            (load_columns, (own, k_ring, v_ring, (q, grad), k, v, spans, sample, head, head // GROUP, begin, T, 2)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _keys_group(
    PART: gl.constexpr, own, ring, memory, sums, dk, dv, spans, begin_of_all, d_t, T, c, scale, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute the tile PART of the keys from `begin_of_all` on. sums, of the first of the heads that share them, dk and
    dv: of their head; spans: of their sample. memory: two slots for each part, by which the sums of a tile of queries
    reach all threads."""
    begin = begin_of_all + PART * ROWS
    columns = begin + gl.arange(0, ROWS, layout=ROW)
    end = end_of_queries(spans, begin_of_all, T)
    if spans is not None:
        ends = gl.load(spans + 2 * columns + 1, mask=columns < T, other=0)
        clear = gl.load(spans + 2 * gl.minimum(begin, T - 1) + 1)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    dk_tile = gl.zeros([ROWS, D], gl.float32, SUMS)
    dv_tile = gl.zeros([ROWS, D], gl.float32, SUMS)
    head, first = 0, begin_of_all
    put_pairs(memory, 2 * PART, load_pairs(sums, head, first, T, True))
    k, v = tile_of(own, PART, 0), tile_of(own, PART, 1)
    wait(own, PART)
    count = gl.cdiv(end - begin_of_all, ROWS) * GROUP
    for i in range(count):
        next_head, next_first = next_queries(head, first, begin_of_all, end)
        pairs = load_pairs(sums, next_head, next_first, T, i + 1 < count)
        slot = 2 * PART + (i & 1)
        level = memory.index(2 * slot).load(COLUMN) * (-1.0 / c)
        delta = -memory.index(2 * slot + 1).load(COLUMN)
        wait(ring, i)
        q, g = tile_of(ring, i, 0), tile_of(ring, i, 1)
        # Products begin with the sums to subtract, as in `keys_by_tiles`.
        levels, _ = gl.broadcast(level[None, :], zeros)
        deltas, _ = gl.broadcast(delta[None, :], zeros)
        scores = warpgroup_mma(k, q.permute((1, 0)), levels, is_async=True)
        dp = warpgroup_mma(v, g.permute((1, 0)), deltas, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        p = gl.exp2(scores * c)
        hidden = first <= begin
        if spans is not None:
            hidden |= first + ROWS > clear
        if hidden:
            rows = first + gl.arange(0, ROWS, layout=COLUMN)
            p = gl.where(rows[None, :] >= columns[:, None], p, 0.0)
            if spans is not None:
                p = gl.where(rows[None, :] < ends[:, None], p, 0.0)
        left = gl.convert_layout(p.to(k.dtype), LEFT)
        dv_tile = warpgroup_mma(left, g, dv_tile, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = gl.convert_layout((p * dp).to(k.dtype), LEFT)
        dk_tile = warpgroup_mma(ds, q, dk_tile, is_async=True)
        put_pairs(memory, 2 * PART + 1 - (i & 1), pairs)
        dv_tile, left, dk_tile, ds = warpgroup_mma_wait(0, deps=[dv_tile, left, dk_tile, ds])
        free(ring, i)
        head, first = next_head, next_first
    store(dk, begin, d_t, dk_tile * scale, T)
    store(dv, begin, d_t, dv_tile, T)


@gluon.jit(do_not_specialize=["places"])
def keys_by_warps(
    q, k, v, grad, sums, dk, dv, spans, d_b, d_t, d_n, T, N, places, c, scale,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv, of strides d_b, d_t, d_n, from the sums of `queries_by_warps`, in transposed tiles as
    `keys_by_tiles` does. Grid (ceil(T / BLOCK_N) B N / GROUP)."""
    gl.static_assert(BLOCK_M == ROWS and BLOCK_N == 2 * ROWS)
    tile, place = program_tile(gl.cdiv(T, BLOCK_N), places, BAND)
    sample, group = place // (N // GROUP), place % (N // GROUP)
    begin = tile * BLOCK_N
    own, ring = ring_of(k, 2, 1, 2), ring_of(q, STAGES, 2, 2)
    memory = gl.allocate_shared_memory(gl.float32, [8, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    sums += (sample * N + group * GROUP).to(gl.int64) * 2 * T
    dk += sample.to(gl.int64) * d_b + group * d_n
    dv += sample.to(gl.int64) * d_b + group * d_n
    if spans is not None:
        spans += sample.to(gl.int64) * 2 * T
    gl.warp_specialize(
        [
            (_keys_group, (0, own, ring, memory, sums, dk, dv, spans, begin, d_t, T, c, scale, GROUP)),
            (_keys_group, (1, own, ring, memory, sums, dk, dv, spans, begin, d_t, T, c, scale, GROUP)),
            (load_queries, (own, ring, k, v, q, grad, spans, sample, group, begin, T, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )
