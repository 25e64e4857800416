"""Triton kernels of attention over a cache, one query position a sequence. Needs Triton.

Positions are split at fixed multiples of 128. Each split is a softmax with its own maximum; splits are merged in
ascending order (Dao et al. 2023, "Flash-Decoding for long-context inference"). Sums of probabilities are tensor-core
products with ones, of the rounded probabilities that also multiply v. A row's result does not depend on other rows.
"""

import triton
import triton.language as tl

from dtgpt.ops.decode.kernels import begin

SPLIT = tl.constexpr(128)


@triton.jit
def attention_kernel(
    q, keys, values, slots, positions, partial, state, arrived, out, scale, q_row, q_group,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from the query heads of one head of k and v to EACH splits of one sequence's positions. The program that
    ends last of a head merges the splits of all.

    q: `[B, N_kv, GROUP, D]` with the strides q_row and q_group of its first two dimensions. keys, values: `[slots,
    N_kv, LENGTH, D]`. slots, positions: int64 `[B]`. partial: fp32 `[B, N, SPLITS, D]`; state: fp32 `[B, N, SPLITS,
    2]`, the maximum and the sum of each split. arrived: int32 `[B, N_kv]`, zero before and after. out: `[B, N, D]`.
    QUERIES: GROUP, or the least size of a product. scale: log2(e) / sqrt(D).
    """
    head, row = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, SIZE)
    r = tl.arange(0, QUERIES)
    offset = tl.arange(0, SPLIT)
    ones = tl.full((SPLIT, 16), 1.0, keys.dtype.element_ty)
    begin(PDL)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    used = position // SPLIT + 1
    first = tl.program_id(0) * EACH
    if first >= used:
        return
    group = row.to(tl.int64) * KV_HEADS + head
    inside = (r < GROUP)[:, None]
    query = tl.load(q + row.to(tl.int64) * q_row + head * q_group + r[:, None] * SIZE + d[None, :], inside, 0.0)
    base = (slot * KV_HEADS + head) * LENGTH * SIZE
    cell = (group * GROUP + r) * SPLITS
    for split in tl.range(first, tl.minimum(first + EACH, used), num_stages=STAGES):
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
        tl.store(partial + (cell + split)[:, None] * SIZE + d[None, :], made, inside)
        tl.store(state + 2 * (cell + split), largest, r < GROUP)
        tl.store(state + 2 * (cell + split) + 1, total, r < GROUP)
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(arrived + group, 1, sem="acq_rel", scope="gpu") == tl.cdiv(used, EACH) - 1:
        merged = merge(partial, state, cell, used, r < GROUP, QUERIES, SIZE)
        tl.store(out + (group * GROUP + r)[:, None] * SIZE + d[None, :], merged.to(out.dtype.element_ty), inside)
        tl.store(arrived + group, 0)


@triton.jit
def merge(partial, state, cell, used, inside, QUERIES: tl.constexpr, SIZE: tl.constexpr):
    """Return the merged splits `[QUERIES, SIZE]` of query heads, whose first splits are at `cell`."""
    d = tl.arange(0, SIZE)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    for base in range(0, used, 8):
        for step in tl.static_range(8):  # unrolled, so that loads do not wait for each other
            there = inside & (base + step < used)
            found = tl.load(state + 2 * (cell + base + step), there, float("-inf"), cache_modifier=".cg")
            largest = tl.maximum(largest, found)
    total = tl.zeros((QUERIES,), tl.float32)
    made = tl.zeros((QUERIES, SIZE), tl.float32)
    for base in range(0, used, 8):
        for step in tl.static_range(8):
            there = inside & (base + step < used)
            at = cell + base + step
            found = tl.load(state + 2 * at, there, float("-inf"), cache_modifier=".cg")
            factor = tl.where(there, tl.exp2(found - largest), 0.0)
            total = tl.fma(factor, tl.load(state + 2 * at + 1, there, 0.0, cache_modifier=".cg"), total)
            part = tl.load(partial + at[:, None] * SIZE + d[None, :], there[:, None], 0.0, cache_modifier=".cg")
            made = tl.fma(tl.broadcast_to(factor[:, None], (QUERIES, SIZE)), part, made)
    return tl.math.div_rn(made, tl.broadcast_to(total[:, None], (QUERIES, SIZE)))
