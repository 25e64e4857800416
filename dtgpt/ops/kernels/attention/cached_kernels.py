"""Triton kernels of attention over a cache, one query position a sequence. Needs Triton.

Positions are split at fixed multiples of 128. Each split is a softmax with its own maximum; splits are merged in
ascending order (Dao et al. 2023, "Flash-Decoding for long-context inference"). Sums of probabilities are tensor-core
products with ones, of the rounded probabilities that also multiply v. A row's result does not depend on other rows.

Slots and positions are read before the wait for the kernel before: no kernel that lets the next one start writes them.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.attention.flash_tiles import LOG2_E
from dtgpt.ops.kernels.attention.joint_kernels import angles, clamped, joint_rstds, turned_heads
from dtgpt.ops.kernels.decode.kernels import begin

SPLIT = tl.constexpr(128)


@triton.jit
def rotary_heads(heads, inside, weight, eps, table, places, position, SIZE: tl.constexpr):
    """Return heads `[R, SIZE]` at pointers `[R, 1]`, normalised by RMSNorm where a weight `[SIZE]` is given, rotated to
    a position. table: fp32 `[2, places, SIZE / 2]`, cosine and sine of each angle."""
    HALF: tl.constexpr = SIZE // 2
    d = tl.arange(0, SIZE)
    other = (d + HALF) % SIZE  # the column with which each is rotated
    x = tl.load(heads + d[None, :], inside, 0.0)
    y = tl.load(heads + other[None, :], inside, 0.0)
    if weight is not None:
        wide = x.to(tl.float64)
        rstd = (1.0 / tl.sqrt(tl.sum(wide * wide, 1) / SIZE + eps)).to(tl.float32)[:, None]
        a = x.to(tl.float32) * rstd * tl.load(weight + d).to(tl.float32)[None, :]
        b = y.to(tl.float32) * rstd * tl.load(weight + other).to(tl.float32)[None, :]
    else:
        a, b = x.to(tl.float32), y.to(tl.float32)
    angle = position * HALF + d % HALF
    cosine, sine = tl.load(table + angle), tl.load(table + places * HALF + angle)
    turned = b * tl.where(d < HALF, -sine, sine)[None, :]
    return tl.fma(a, tl.broadcast_to(cosine[None, :], a.shape), turned).to(x.dtype)


@triton.jit
def rotate_kernel(
    packed, turned, keys, values, slots, positions, table, q_norm, k_norm, eps, q_row, q_group, places,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the queries of one head of k and v of one sequence, to `turned` `[B, N_kv, GROUP, D]`, and
    write the new token's k, likewise, and v to the cache.

    packed: `[B, N_kv, GROUP + 2, D]`, of each head the GROUP queries, then k and v. QUERIES: GROUP, as a power of two.
    The rest is as of `split_kernel`.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, SIZE)[None, :]
    r = tl.arange(0, QUERIES)[:, None]
    behind = tl.arange(0, 1)[:, None] + GROUP
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    begin(PDL)
    heads = packed + row * q_row + head * q_group
    query = rotary_heads(heads + r * SIZE, r < GROUP, q_norm, eps, table, places, position, SIZE)
    new_k = rotary_heads(heads + behind * SIZE, behind == GROUP, k_norm, eps, table, places, position, SIZE)
    new_v = tl.load(heads + (behind + 1) * SIZE + d)
    here = ((slot * KV_HEADS + head) * LENGTH + position) * SIZE + d
    tl.store(turned + ((row * KV_HEADS + head) * GROUP + r) * SIZE + d, query, r < GROUP)
    tl.store(keys + here, new_k)
    tl.store(values + here, new_v)


@triton.jit
def split_kernel(
    q, keys, values, slots, positions, partial, state, scale, table, q_norm, k_norm, eps, q_row, q_group, places,
    LIMIT: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from the query heads of one head of k and v to some splits of one sequence's positions: EACH that follow
    each other, or, where STEP is not 1, every STEP-th.

    q: `[B, N_kv, GROUP, D]` with the strides q_row and q_group of its first two dimensions. keys, values: `[slots,
    N_kv, LENGTH, D]`. slots, positions: int64 `[B]`. partial: fp32 `[B, N, SPLITS, D]`; state: fp32 `[B, N, SPLITS,
    2]`, the maximum and the sum of each split. q_norm `[N D]`, k_norm, LIMIT, HEADS: as of `joint_rotate_kernel`, where
    norms are of all heads together. QUERIES: GROUP, or the least size of a product. scale: log2(e) /
    sqrt(D). table, places: as of `rotary_heads`; with a table q is rotated, and k, rotated, and v `[D]` behind the
    GROUP queries are written to the cache.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, SIZE)
    r = tl.arange(0, QUERIES)
    offset = tl.arange(0, SPLIT)
    ones = tl.full((SPLIT, 16), 1.0, keys.dtype.element_ty)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    first = tl.program_id(0) * (EACH if STEP == 1 else 1)
    newest = position // SPLIT
    last = tl.minimum(first + EACH, newest + 1) if STEP == 1 else newest + 1
    cosine, turn = 0.0, 0.0
    if q_norm is not None:
        cosine, turn = angles(table, places, position, SIZE)
    begin(PDL)
    if first >= last:
        return
    queries = q + row.to(tl.int64) * q_row + head * q_group
    if table is None:
        query = tl.load(queries + r[:, None] * SIZE + d[None, :], (r < GROUP)[:, None], 0.0)
    elif q_norm is not None:
        q_rstd, k_rstd = joint_rstds(q + row.to(tl.int64) * q_row, eps, KV_HEADS, GROUP, HEADS, SIZE)
        q_weight, inside = q_norm + (head * GROUP + r)[:, None] * SIZE, (r < GROUP)[:, None]
        query = turned_heads(queries + r[:, None] * SIZE, inside, q_weight, q_rstd, cosine, turn, LIMIT, SIZE)
    else:
        query = rotary_heads(
            queries + r[:, None] * SIZE, (r < GROUP)[:, None], None, 0.0, table, places, position, SIZE
        )
    base = (slot * KV_HEADS + head) * LENGTH * SIZE
    if table is not None:
        # The program that attends to the new token writes its k and v, and reads them like those of all others.
        behind = tl.arange(0, 1)[:, None] + GROUP
        writes = (behind == GROUP) & (newest >= first) & (newest < last) & ((newest - first) % STEP == 0)
        if q_norm is not None:
            k_weight = k_norm + head * SIZE + 0 * behind
            new_k = turned_heads(queries + behind * SIZE, writes, k_weight, k_rstd, cosine, turn, LIMIT, SIZE)
        else:
            new_k = rotary_heads(queries + behind * SIZE, writes, None, 0.0, table, places, position, SIZE)
        new_v = clamped(tl.load(queries + (behind + 1) * SIZE + d[None, :], writes, 0.0), LIMIT)
        here = base + position * SIZE + d[None, :]
        tl.store(keys + here, new_k, writes)
        tl.store(values + here, new_v, writes)
        tl.debug_barrier()
    for split in tl.range(first, last, STEP, num_stages=STAGES):
        at = split * SPLIT + offset
        seen = at <= position
        cells = base + at[:, None] * SIZE + d[None, :]
        k = tl.load(keys + cells, seen[:, None], 0.0)
        v = tl.load(values + cells, seen[:, None], 0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest = tl.max(scores, 1)
        p = tl.exp2(scores - largest[:, None]).to(v.dtype)
        total = tl.max(tl.dot(p, ones, input_precision="ieee"), 1)  # its columns are equal
        made = tl.dot(p, v, input_precision="ieee")
        cell = ((row.to(tl.int64) * KV_HEADS + head) * GROUP + r) * SPLITS + split
        tl.store(partial + cell[:, None] * SIZE + d[None, :], made, (r < GROUP)[:, None])
        tl.store(state + 2 * cell, largest, r < GROUP)
        tl.store(state + 2 * cell + 1, total, r < GROUP)


@triton.jit
def write_kernel(
    k, v, keys, values, slots, batch, position, head_stride, T,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS positions of one head of one sequence of k and v `[B, T, N_kv, D]` to the cache `[slots, N_kv, LENGTH,
    D]`. batch, position, head_stride: the strides of k and v. BLOCK: D, as a power of two."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    inside = (t < T)[:, None] & (d < SIZE)[None, :]
    source = row * batch + head * head_stride + t.to(tl.int64)[:, None] * position + d[None, :]
    target = ((tl.load(slots + row) * KV_HEADS + head) * LENGTH + t)[:, None] * SIZE + d[None, :]
    tl.store(keys + target, tl.load(k + source, inside), inside)
    tl.store(values + target, tl.load(v + source, inside), inside)


@triton.jit
def merge_kernel(
    partial, state, positions, out, sinks,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one sequence, and its sink where there are sinks `[N]`, into out `[B, N, D]`.
    BLOCK: SPLITS, as a power of two."""
    head, row = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, SIZE)
    j = tl.arange(0, BLOCK)
    used = tl.load(positions + row).to(tl.int32) // SPLIT + 1
    begin(PDL)
    cell = (row.to(tl.int64) * HEADS + head) * SPLITS
    largest = tl.max(tl.load(state + 2 * (cell + j), j < used, float("-inf")), 0)
    total, made, everywhere = 0.0, tl.zeros((SIZE,), tl.float32), tl.full((SIZE,), 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)
    for base in range(0, used, 8):
        for step in tl.static_range(8):  # unrolled, so that loads do not wait for each other
            there = base + step < used
            at = cell + base + step
            factor = tl.exp2(tl.load(state + 2 * at, there, float("-inf")) - largest)
            total = tl.fma(factor, tl.load(state + 2 * at + 1, there, 0.0), total)
            made = tl.fma(everywhere * factor, tl.load(partial + at * SIZE + d, there, 0.0), made)
    made = tl.math.div_rn(made, everywhere * total)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * SIZE + d, made.to(out.dtype.element_ty))
