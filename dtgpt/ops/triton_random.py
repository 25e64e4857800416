"""The masks of `dtgpt.ops.dropout`, drawn inside a Triton kernel. To be imported where Triton is.

Triton carries the same Philox4x32-10. A tile of decisions costs one evaluation for every eight neighbours of the last
dimension, in registers: no mask is read or written.
"""

import triton
import triton.language as tl


@triton.jit
def keep_tile(k0, k1, rows, blocks, c2, c3, drop):
    """Keep decisions bool `[R, 8 C]` of the rows `[R]` and the blocks of eight columns `[C]`, int32 global indices.

    k0, k1: the two words of a key, as loaded from an int64 tensor. c2, c3: the index of the dimensions before the
    row's, or 0. drop: `threshold(p)`. Element (row, 8 b + lane) is that of `keep_mask(key, (..., row, column), p)`.
    """
    seed = (k0.to(tl.uint64) & 0xFFFFFFFF) | (k1.to(tl.uint64) << 32)
    c0 = tl.broadcast_to(blocks[None, :], (rows.shape[0], blocks.shape[0])).to(tl.uint32)
    c1 = tl.broadcast_to(rows[:, None], (rows.shape[0], blocks.shape[0])).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c0 * 0 + c2, c0 * 0 + c3)
    # Lane 2 i is the low half of word i, lane 2 i + 1 the high half: the words are the outer index.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, C, 2, 2], word 2 i + j at [i, j]
    lanes = tl.join(words & 0xFFFF, words >> 16)  # [R, C, 2, 2, 2]
    return tl.reshape(lanes, (rows.shape[0], 8 * blocks.shape[0])) >= drop
