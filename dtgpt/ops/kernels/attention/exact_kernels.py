"""A Triton kernel of attention over a cache with the bits of training's forward pass, one query position a sequence.

A program goes over the keys of one head of one sequence by the loop of `flash_kernels`, in tiles of as many keys, so
that a query's sums have the order that they have there. Needs Triton.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.attention.flash_kernels import forward_tiles
from dtgpt.ops.kernels.attention.flash_tiles import LOWEST


@triton.jit
def exact_kernel(
    q, k, v, keys, values, slots, positions, out, q_row, q_head, k_row, k_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write k and v of one sequence's newest token to the cache, and attend to it from the GROUP query heads of one
    head of keys and values.

    q: `[B, N_kv, GROUP, D]`, whose last two dimensions are dense, with strides q_row and q_head; k, v: `[B, N_kv, D]`
    with common strides k_row and k_head. keys, values: `[slots, N_kv, LENGTH, D]`. slots, positions: int64 `[B]`. out:
    `[B, N, D]`. scale: log2(e) / sqrt(D). BLOCK_M: rows of a tile of queries, of which GROUP are used.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row).to(tl.int32)
    d = tl.arange(0, WIDTH)
    r = tl.arange(0, BLOCK_M)
    base = (slot * KV_HEADS + head) * LENGTH * SIZE
    newest = position * SIZE + d
    tl.store(keys + base + newest, tl.load(k + row * k_row + head * k_head + d, d < SIZE, 0.0), d < SIZE)
    tl.store(values + base + newest, tl.load(v + row * k_row + head * k_head + d, d < SIZE, 0.0), d < SIZE)
    tl.debug_barrier()  # other threads read what these wrote
    inside = (r < GROUP)[:, None] & (d < SIZE)[None, :]
    query = tl.load(q + row * q_row + head * q_head + r[:, None] * SIZE + d[None, :], inside, 0.0)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    at = position + r * 0  # all heads of the group are at one position
    middle, end = position // BLOCK_N * BLOCK_N, position + 1
    acc, total, top = forward_tiles(
        acc, total, top, query, keys + base, values + base, keys, at, at, 0, 0, 0, middle, SIZE, end, end, scale,
        SIZE, WIDTH, BLOCK_N, False, False, False, False,
    )  # fmt: skip
    acc, total, top = forward_tiles(
        acc, total, top, query, keys + base, values + base, keys, at, at, middle, 0, 0, end, SIZE, end, end, scale,
        SIZE, WIDTH, BLOCK_N, True, False, True, False,
    )  # fmt: skip
    made = acc * (1.0 / total)[:, None]
    target = (row * KV_HEADS + head) * GROUP * SIZE + r[:, None] * SIZE + d[None, :]
    tl.store(out + target, made.to(out.dtype.element_ty), inside)
