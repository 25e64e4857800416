"""The masks of `dtgpt.ops.random.dropout`, drawn inside a Triton kernel. Needs Triton.

A tile of decisions costs one evaluation of Philox4x32-10 for every eight neighbours of the last dimension, in
registers: no mask is read or written.
"""

import triton
import triton.language as tl

PHILOX_A = tl.constexpr(0xD2511F53)
PHILOX_B = tl.constexpr(0xCD9E8D57)
WEYL_A = tl.constexpr(0x9E3779B9)
WEYL_B = tl.constexpr(0xBB67AE85)


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Evaluate Philox4x32-10 on uint32 words. Each product is computed once, in 64 bits and in its factor's shape."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * PHILOX_A
        b = c2.to(tl.uint64) * PHILOX_B
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = tl.add(k0, WEYL_A, sanitize_overflow=False)
        k1 = tl.add(k1, WEYL_B, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def keep_tile(k0, k1, rows, blocks, c2, c3, drop):
    """Return keep decisions bool `[R, 8 C]` for rows `[R]` and blocks of eight columns `[C]`, int32 global indices.

    k0, k1: the two words of a key, as loaded from an int64 tensor. c2, c3: the index of the dimensions before the
    row's, or 0. drop: `threshold(p)`. Element (row, 8 b + lane) equals that of `keep_mask(key, (..., row, column), p)`.
    """
    zero = tl.full((), 0, tl.uint32)
    w0, w1, w2, w3 = philox(
        k0.to(tl.uint32),
        k1.to(tl.uint32),
        blocks[None, :].to(tl.uint32),
        rows[:, None].to(tl.uint32),
        zero + c2,
        zero + c3,
    )
    # Lane 2 i is the low half of word i, lane 2 i + 1 the high half: the words are the outer index.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, C, 2, 2], word 2 i + j at [i, j]
    lanes = tl.join(words & 0xFFFF, words >> 16)  # [R, C, 2, 2, 2]
    return tl.reshape(lanes, (rows.shape[0], 8 * blocks.shape[0])) >= drop
