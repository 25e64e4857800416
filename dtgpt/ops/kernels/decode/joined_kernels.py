"""A Triton kernel of decode steps of very few rows: the merge of attention's splits and the product behind it, two
kernels where there are more rows. Needs Triton."""

import triton
import triton.language as tl

from dtgpt.ops.kernels.attention.cached_kernels import SPLIT
from dtgpt.ops.kernels.decode.kernels import GROUP, SEGMENT, begin


@triton.jit
def merged_product_kernel(
    partial, state, positions, weight, own, out, rows, columns, K,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do what `cached_kernels.merge_kernel` and then `kernels.product_kernel` with the epilogue "groups" do, for a tile
    of columns and one group of K = N D, with the same bits: each program merges the heads that it multiplies, keeps
    them in memory of its own, `own` `[programs, M, 512]`, and has loaded its weights before the wait for the kernel
    before. BLOCK: SPLITS, as a power of two."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BM), tile * BN + tl.arange(0, BN), tl.arange(0, SEGMENT)
    column_inside = (n < columns) | EVEN
    first = part * GROUP
    w_at = weight + n.to(tl.int64)[None, :] * K + first + k[:, None]
    w = ()
    for step in tl.static_range(0, GROUP, SEGMENT):
        inside = column_inside[None, :] & ((first + step + k < K) | EVEN)[:, None]
        w = w + (tl.load(w_at + step, inside, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    head, d, j = part * (GROUP // SIZE) + tl.arange(0, GROUP // SIZE), tl.arange(0, SIZE), tl.arange(0, BLOCK)
    there = head < HEADS
    own += (part * tl.num_programs(0) + tile).to(tl.int64) * rows * GROUP
    begin(PDL)
    for row in range(rows):
        used = tl.load(positions + row).to(tl.int32) // SPLIT + 1
        cell = (row * HEADS + head) * SPLITS
        known = there[:, None] & (j < used)[None, :]
        largest = tl.max(tl.load(state + 2 * (cell[:, None] + j[None, :]), known, float("-inf")), 1)
        total, made = tl.zeros((GROUP // SIZE,), tl.float32), tl.zeros((GROUP // SIZE, SIZE), tl.float32)
        for base in range(0, used, 8):
            for step in tl.static_range(8):  # unrolled, so that loads do not wait for each other
                taken, at = there & (base + step < used), cell + base + step
                factor = tl.exp2(tl.load(state + 2 * at, taken, float("-inf")) - largest)
                total = tl.fma(factor, tl.load(state + 2 * at + 1, taken, 0.0), total)
                added = tl.load(partial + at[:, None] * SIZE + d[None, :], taken[:, None], 0.0)
                made = tl.fma(tl.broadcast_to(factor[:, None], added.shape), added, made)
        made = tl.math.div_rn(made, tl.broadcast_to(total[:, None], made.shape))
        kept = own + row * GROUP + tl.arange(0, GROUP // SIZE)[:, None] * SIZE + d[None, :]
        tl.store(kept, made.to(own.dtype.element_ty), tl.broadcast_to(there[:, None], made.shape))
    tl.debug_barrier()
    x_at = own + m[:, None] * GROUP + k[None, :]
    group = tl.zeros((BM, BN), tl.float32)
    for step in tl.static_range(0, GROUP, SEGMENT):
        left = (first + step + k < K) | EVEN
        x_part = tl.load(x_at + step, (m < rows)[:, None] & left[None, :], 0.0)
        segment = tl.dot(x_part, w[step // SEGMENT], tl.zeros((BM, BN), tl.float32))
        group = tl.fma(segment, 1.0, group)
    here = out + (part.to(tl.int64) * rows + m[:, None]) * columns + n[None, :]
    tl.store(here, group, (m < rows)[:, None] & column_inside[None, :])
