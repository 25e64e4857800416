"""What the Triton kernels of sampling have in common: logits in chunks, their order as whole numbers, and the noise.
Needs Triton.

An id and its score are one int64: the score's bits in an order of whole numbers, then the complement of the id, so that
the largest is the likeliest and the smallest id among equals.
"""

import triton
import triton.language as tl

from dtgpt.ops.kernels.triton_philox import philox
from dtgpt.ops.sampling.sequences import PARAMETERS, Integers

CHUNK = 1024  # ids that a program takes; each thread has eight
WARPS = 4

ROW = tl.constexpr(PARAMETERS)
PROMPT_LENGTH = tl.constexpr(Integers._fields.index("prompt_length"))
COLON = tl.constexpr(Integers._fields.index("colon"))
NEWLINE = tl.constexpr(Integers._fields.index("newline"))
KEY = tl.constexpr(Integers._fields.index("key_0"))

WEIGHT = tl.constexpr(2.0**40)  # that of the peak
LAST = tl.constexpr(-(1 << 63))  # below every pair of a score and an id
LOW_WORD = tl.constexpr(0xFFFFFFFF)
CELL = tl.constexpr(2.3283064365386963e-10)  # 2^-32
ROUNDING = tl.constexpr(1e-5)  # of sums in fp32 and of their logarithms, relative to 1 + the sum


@triton.jit
def ordered(values):
    """Return int32 numbers that have the order of fp32 values; -0 equals 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(numbers):
    """Return the values of `ordered` numbers."""
    return tl.where(numbers < 0, numbers ^ 0x7FFFFFFF, numbers).to(tl.float32, bitcast=True)


@triton.jit
def paired(values, ids):
    """Return int64 pairs of fp32 values and ids."""
    return (ordered(values).to(tl.int64) << 32) | (ids.to(tl.int64) ^ LOW_WORD)


@triton.jit
def id_of(pair):
    """Return the id of a pair."""
    return (pair & LOW_WORD) ^ LOW_WORD


@triton.jit
def value_of(pair):
    """Return the value of a pair."""
    return unordered((pair >> 32).to(tl.int32))


@triton.jit
def weight_of(values, peak):
    """Return exponentials relative to that of the peak, as whole numbers: their sum has no order, so that it does not
    depend on the layout, which follows the dtype and alignment of logits."""
    return (tl.exp(values - peak) * WEIGHT + 0.5).to(tl.int64)


@triton.jit
def load_float(parameters, index):
    """Return a parameter that is the bit pattern of a float64."""
    return tl.load(parameters + index).to(tl.float64, bitcast=True)


@triton.jit
def noise_words(parameters, position, first, CHUNK: tl.constexpr):
    """Return the random words of ids `first` to `first + CHUNK`, uint32."""
    k0, k1 = tl.load(parameters + KEY).to(tl.uint32), tl.load(parameters + KEY + 1).to(tl.uint32)
    block = (first // 4 + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox(k0, k1, block, zero + position.to(tl.uint32), zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CHUNK,))  # word 2 i + j is at [i, j]


@triton.jit
def gumbel(words):
    """Return the noise that words stand for, fp32, equal to that of the reference."""
    uniform = (words.to(tl.float64) + 0.5) * CELL
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def gumbel_bound(words):
    """Return numbers that `gumbel` does not exceed, but for rounding: -log(r), since -log(1 - r) is at least r. They
    are close where the noise is large, and take no arithmetic in fp64."""
    return -tl.log(((words ^ LOW_WORD).to(tl.float32) + 0.5) * CELL)


@triton.jit
def best_draw(parameters, position, first, values, stays, temperature, CHUNK: tl.constexpr):
    """Return the pair of the largest of values / temperature + `gumbel` among those of ids `first` to `first + CHUNK`
    that stay; LAST where none does. Ids get their noise in the order of its bounds, until none can be the largest."""
    ids = first + tl.arange(0, CHUNK)
    words = noise_words(parameters, position, first, CHUNK)
    if temperature != 1.0:
        values = tl.div_rn(values, temperature)
    left = tl.where(stays, values + gumbel_bound(words), float("-inf"))
    top, best, reached = tl.max(left, 0), LAST, tl.full((), float("-inf"), tl.float32)
    while (top > float("-inf")) & (top >= reached - ROUNDING * (1.0 + tl.abs(reached))):
        one = tl.max(tl.where(left == top, ids, -1), 0)
        word, value = tl.sum(tl.where(ids == one, words, 0), 0), tl.sum(tl.where(ids == one, values, 0.0), 0)
        score = value + gumbel(word)
        reached, best = tl.maximum(reached, score), tl.maximum(best, paired(score, one))
        left = tl.where(ids == one, float("-inf"), left)
        top = tl.max(left, 0)
    if best == LAST:  # no score is finite
        best = tl.max(tl.where(stays, paired(tl.full((CHUNK,), float("-inf"), tl.float32), ids), LAST), 0)
    return best


@triton.jit
def load_chunk(line, ids, width, vocab_size):
    """Return logits in fp32, -inf where an id is not a token. The bound is that of memory, so that a thread's
    neighbours share one access."""
    values = tl.load(line + ids, mask=ids < width, other=0.0).to(tl.float32)
    return tl.where(ids < vocab_size, values, float("-inf"))
