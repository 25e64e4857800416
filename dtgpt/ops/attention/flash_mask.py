"""Keep decisions of attention dropout as bits: how `flash_kernels` draws and reads them. Needs Triton.

They are stored in a temporary buffer, int64 `[B N, ceil(S / 64), T]`. Word (g, query) holds the decisions of a query
for the columns 64 g to 64 g + 63, in the order of `kept`. One thread draws a whole word, so that all of Philox that
depends on the column alone is scalar, and reading a decision costs at most a test and a select.
"""

import triton
import triton.language as tl

from dtgpt.ops.random.triton_philox import philox

WORD = tl.constexpr(64)  # columns that share a word of keep decisions
DRAWN = tl.constexpr(128)  # queries whose words a program draws at a time, one a thread


@triton.jit
def _decide(word, drop, SIMD: tl.constexpr):
    """Return bits 0 and 16: whether the halves of a word are kept. drop: at least 1. SIMD: the GPU compares two halves
    with one instruction (compute capability 9.0 and above)."""
    if SIMD:
        ones = tl.full(word.shape, 0x10001, tl.uint32)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 more; max.u16x2 more, $1, $2; sub.u32 more, more, $2; min.u16x2 $0, more, $3; }",
            "=r,r,r,r",
            [word, ones * (drop - 1).to(tl.uint32), ones],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    # A half is kept where adding 2^16 - drop carries out of its 16 bits.
    low = ((word & 0xFFFF) + (65536 - drop)) >> 16
    return low | (((word >> 16) + (65536 - drop)) & 0x10000)


@triton.jit
def _words(k0, k1, rows, group, head, drop, SIMD: tl.constexpr):
    """Return int64 `[R]`: the keep decisions of the positions `rows [R]` of queries for the 64 columns of a group."""
    packed = tl.zeros(rows.shape, tl.uint64)
    for part in tl.static_range(2):
        bits = tl.zeros(rows.shape, tl.uint32)
        for i in tl.static_range(4):
            block = 8 * group + 4 * part + (3 - i) % 2 * 2 + (3 - i) // 2  # blocks 3, 1, 2, 0: see `kept`
            words = philox(
                k0, k1, block.to(tl.uint32), rows.to(tl.uint32), head.to(tl.uint32), tl.full((), 0, tl.uint32)
            )
            for j in tl.static_range(4):
                bits = bits * 2 + _decide(words[3 - j], drop, SIMD)
        packed |= bits.to(tl.uint64) << (32 * part)
    return packed.to(tl.int64, bitcast=True)


@triton.jit
def kept(low, high, lanes):
    """Return whether words, given as halves, keep their columns `lanes`, 0 ... 63; shapes broadcast.

    In a half, the columns 8 e + 2 i and 8 e + 2 i + 1, which lie in one register of the tensor cores' layout, are at
    bit 8 (e % 2) + 4 (e // 2) + i and 16 above it.
    """
    bit = ((lanes & 1) << 4) | (lanes & 8) | ((lanes & 16) >> 2) | ((lanes & 6) >> 1)
    return (tl.where(lanes < 32, low, high) & (tl.full(lanes.shape, 1, tl.int32) << bit)) != 0


@triton.jit
def zero_dropped(p, low, high, lanes):
    """Return p `[M, N]` where the words keep its columns `lanes`, else 0. Fast for 16-bit operands of products.

    With the bit order of `kept`, one shift, which a thread shares among many elements, moves an element's bit to the
    sign of a byte, and `prmt` makes the mask of two elements at once by replicating the signs of two bytes.
    """
    if p.dtype.primitive_bitwidth != 16:
        return tl.where(kept(low, high, lanes), p, 0.0)
    shifted = tl.where(lanes < 32, low, high) << (7 - ((lanes & 16) >> 2) - ((lanes & 6) >> 1))
    spread = (((lanes & 1) << 1) | ((lanes & 8) >> 3)) * 0x11 + 0x88  # prmt's name for twice the sign of that byte
    shifted, spread = tl.broadcast(shifted, spread)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 spread, mask;
        shl.b32 spread, $5, 8;
        add.u32 spread, spread, 0x4400; // the second element's bytes count from 4
        or.b32 spread, spread, $4;
        prmt.b32 mask, $2, $3, spread;
        and.b32 $0, $1, mask;
        }""",
        "=r,r,r,r,r,r",
        [p, shifted, spread],
        dtype=p.dtype,
        is_pure=True,
        pack=2,
    )


@triton.jit
def draw(
    key, stride_sample, stride_word, words, spans, T, S, group, place, N, start, drop,
    SIMD: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Write the words of a group of columns for all queries of a head that see one of them."""
    end = T
    if SPANS:
        end = tl.load(spans + 2 * (place // N * T + tl.minimum(group * WORD + WORD, T) - 1) + 1)
    key += place // N * stride_sample
    k0 = tl.load(key).to(tl.uint32)
    k1 = tl.load(key + stride_word).to(tl.uint32)
    words += (place.to(tl.int64) * tl.cdiv(S, WORD) + group) * T
    for begin in range(tl.maximum(group * WORD + T - S, 0) // DRAWN * DRAWN, end, DRAWN):
        rows = begin + tl.arange(0, DRAWN)
        tl.store(words + rows, _words(k0, k1, rows + (S - T), group, start + place % N, drop, SIMD), mask=rows < T)
