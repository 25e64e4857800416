"""Keep decisions of attention dropout as bits: how `flash_kernels` draws and reads them. Needs Triton.

Forward draws them once, into int64 `[B N, count]` that is kept for backward; count: `flash_launch.mask_words`. A row
begins with *words of queries*: word (g, query) holds the decisions of a query for the columns 64 g to 64 g + 63. *Words
of columns* follow: word (h, column) holds those of the queries 64 h to 64 h + 63 for one column. Each kernel reads the
words that belong to one thread's rows of its tiles. Where S = T, words that causality hides whole are left out.

The decisions, and the bits of a word of queries, are those of `dtgpt.ops.random.dropout`; words of columns have the
same order of bits. One thread draws whole words of queries that share low digits, and all of Philox that depends on the
column alone is scalar. Reading a decision costs a test and a select. A warp transposes 32 words.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.triton_philox import philox
from dtgpt.ops.random import dropout

WORD = tl.constexpr(64)  # columns or queries that share a word of keep decisions
DRAWN = tl.constexpr(dropout.SHARING)  # queries whose words a program draws at a time, one a thread
SHARED_ROWS = tl.constexpr(dropout.SHARED_ROWS)
LOW_DIGITS = tl.constexpr(dropout.LOW_DIGITS)


@triton.jit
def first_word(group, T, S):
    """Return where word (group, query 0) of queries would be; words of queries before the group's columns are left out
    where S = T."""
    return group * T - tl.where(S == T, group * (group + 1) * (WORD // 2), 0)


@triton.jit
def first_word_of_columns(rows, T, S):
    """Return where word (rows, column 0) of columns is, in a group `rows` of queries."""
    groups = tl.cdiv(S, WORD)
    before = first_word(groups, T, S) + tl.where(S == T, groups * WORD, 0)
    return before + tl.where(S == T, rows * (rows + 1) * (WORD // 2), rows * S)


@triton.jit
def _decide(kept, words, drop, digit: tl.constexpr):
    """Return decisions uint32 `[R]` by the digits up to `digit` + 3, of which `kept` decides by those below `digit`.
    words: the four digits."""
    for i in tl.static_range(4):
        # All ones where the threshold's digit is 0: then either of the two keeps, otherwise both have to.
        either = tl.add(((drop >> (digit + i)) & 1).to(tl.uint32), 0xFFFFFFFF, sanitize_overflow=False)
        kept = (words[i] & kept) | (either & (words[i] | kept))  # one instruction
    return kept


@triton.jit
def _shared_digits(k0, k1, rows, group, head, drop):
    """Return uint32 `[R]`: decisions for the positions `rows [R]` of queries by the eight digits that they share with
    others, see `dtgpt.ops.random.dropout`; the same for both halves of a word."""
    kept = tl.full(rows.shape, 0xFFFFFFFF, tl.uint32)
    zero = tl.full((), 0, tl.uint32)
    row = rows.to(tl.uint32) % DRAWN + SHARED_ROWS
    for i in tl.static_range(2):
        words = philox(k0, k1, (4 * group + i).to(tl.uint32), row, head.to(tl.uint32), zero)
        kept = _decide(kept, words, drop, 4 * i)
    return kept


@triton.jit
def _half_word(kept, k0, k1, rows, group, head, drop, half: tl.constexpr):
    """Return uint32 `[R]`: the keep decisions of the positions `rows [R]` of queries for 32 of the 64 columns of a
    group. kept: what `_shared_digits` returns."""
    zero = tl.full((), 0, tl.uint32)
    for i in tl.static_range(2):
        block = 4 * group + 2 * half + i
        words = philox(k0, k1, block.to(tl.uint32), rows.to(tl.uint32), head.to(tl.uint32), zero)
        kept = _decide(kept, words, drop, LOW_DIGITS + 4 * i)
    return kept


@triton.jit
def _exchange(bits, lane, apart: tl.constexpr, low: tl.constexpr):
    """Swap the bits outside of the mask `low` with the bits inside of it of the thread `apart` lanes further."""
    mask = tl.full(bits.shape, low, tl.uint32)
    upper = (lane & apart) != 0
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 other;
        shfl.sync.bfly.b32 other, $1, $4, 0x1f, 0xffffffff;
        shf.l.wrap.b32 other, other, other, $3;
        lop3.b32 $0, $1, other, $2, 0xe4; // bits of the first where the mask is 1, else of the other
        }""",
        "=r,r,r,r,r",
        [bits, tl.where(upper, ~mask, mask), tl.where(upper, 32 - apart, apart), tl.full(bits.shape, apart, tl.int32)],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _transpose(bits, lane, SHUFFLE: tl.constexpr):
    """Return uint32 `[R]` for bits `[R]` of the threads with these lanes, 0 ... 31: bit j of lane i is bit i of lane j.
    SHUFFLE: every warp holds 32 adjacent elements, one a thread; otherwise for Triton's interpreter."""
    if SHUFFLE:
        bits = _exchange(bits, lane, 16, 0x0000FFFF)
        bits = _exchange(bits, lane, 8, 0x00FF00FF)
        bits = _exchange(bits, lane, 4, 0x0F0F0F0F)
        bits = _exchange(bits, lane, 2, 0x33333333)
        return _exchange(bits, lane, 1, 0x55555555)
    lanes = tl.arange(0, 32)
    square = tl.reshape(bits, (bits.shape[0] // 32, 32, 1))
    square = ((square >> lanes[None, None, :].to(tl.uint32)) & 1) << lanes[None, :, None].to(tl.uint32)
    return tl.reshape(tl.sum(square, 1), bits.shape)


@triton.jit
def kept(low, high, lanes):
    """Return whether words, given as halves, keep their columns or queries `lanes`, 0 ... 63; shapes broadcast.

    In a half, the lanes 8 e + 2 i and 8 e + 2 i + 1, which lie in one register of the tensor cores' layout, are at bit
    8 (e % 2) + 4 (e // 2) + i and 16 above it. A thread has one i, by which it shifts a word once for all its elements.
    """
    shifted = tl.where(lanes < 32, low, high) >> ((lanes & 6) >> 1)
    bit = ((lanes & 1) << 4) | (lanes & 8) | ((lanes & 16) >> 2)
    return (shifted & (tl.full(lanes.shape, 1, tl.int32) << bit)) != 0


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


@triton.jit(do_not_specialize=["start", "drop"])
def draw_kernel(
    key,
    stride_sample,
    stride_word,
    words,
    spans,
    T,
    earlier,
    N,
    count,
    start,
    drop,
    SHUFFLE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Draw the decisions of all queries that see a group of 64 columns. Grid (B N, ceil(S / 64))."""
    S = T if earlier is None else T + earlier
    place, group = tl.program_id(0), tl.program_id(1)
    end = T
    if SPANS:
        end = tl.load(spans + 2 * (place // N * S + tl.minimum(group * WORD + WORD, S) - 1) + 1) + T - S
    key += place // N * stride_sample
    k0 = tl.load(key).to(tl.uint32)
    k1 = tl.load(key + stride_word).to(tl.uint32)
    words += place.to(tl.int64) * count
    halves = words.to(tl.pointer_type(tl.int32))
    thread = tl.arange(0, DRAWN)
    lane = thread % 32
    # The thread of lane i has the query, and after the transposition the column, whose decision is at bit i of a half.
    inside = ((lane & 4) << 2) | (lane & 8) | ((lane & 3) << 1) | (lane >> 4)
    column = group * WORD + inside
    head = start + place % N
    first = tl.maximum(group * WORD + T - S, 0) // WORD * WORD
    shared = _shared_digits(k0, k1, first + thread // 32 * 32 + inside + (S - T), group, head, drop)
    for begin in range(first, end, DRAWN):
        rows = begin + thread // 32 * 32 + inside
        low = _half_word(shared, k0, k1, rows + (S - T), group, head, drop, 0)
        high = _half_word(shared, k0, k1, rows + (S - T), group, head, drop, 1)
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        tl.store(words + first_word(group, T, S) + rows, both.to(tl.int64, bitcast=True), mask=rows < T)
        block = begin // WORD + thread // WORD  # of queries
        place_of_column = halves + 2 * (first_word_of_columns(block, T, S) + column) + thread // 32 % 2
        low, high = _transpose(low, lane, SHUFFLE), _transpose(high, lane, SHUFFLE)
        tl.store(place_of_column, low.to(tl.int32, bitcast=True), mask=(block * WORD < T) & (column < S))
        tl.store(place_of_column + 64, high.to(tl.int32, bitcast=True), mask=(block * WORD < T) & (column + 32 < S))
