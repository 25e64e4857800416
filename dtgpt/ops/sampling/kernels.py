"""Triton kernels of `dtgpt.ops.sampling.sample`. Needs Triton.

A row of logits is cut into chunks, each the work of one program, so that one row alone keeps many multiprocessors busy:
the noise takes two logarithms in float64 an id. A program per row then joins what the chunks found. Filters take two
kernels in between, those of `filter_kernels`.

An id and its score are one int64: the score's bits in an order of whole numbers, then the complement of the id, so that
the largest is the likeliest and the smallest id among equals.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.random.triton_philox import philox
from dtgpt.ops.sampling.sequences import PARAMETERS, Floats, Integers, Sampled, Sequences, Variant

CHUNK = 1024  # ids that a program takes; each thread has eight
WARPS = 4

ROW = tl.constexpr(PARAMETERS)
PROMPT_LENGTH = tl.constexpr(Integers._fields.index("prompt_length"))
KEY = tl.constexpr(Integers._fields.index("key_0"))
COLON = tl.constexpr(Integers._fields.index("colon"))
NEWLINE = tl.constexpr(Integers._fields.index("newline"))
TOP_K = tl.constexpr(Integers._fields.index("top_k"))
TEMPERATURE = tl.constexpr(len(Integers._fields) + Floats._fields.index("temperature"))
TOP_P = tl.constexpr(len(Integers._fields) + Floats._fields.index("top_p"))
TOP_P_DECAY = tl.constexpr(len(Integers._fields) + Floats._fields.index("top_p_decay"))
TOP_P_BOUND = tl.constexpr(len(Integers._fields) + Floats._fields.index("top_p_bound"))

WEIGHT = tl.constexpr(2.0**40)  # that of the peak
LAST = tl.constexpr(-(1 << 63))  # below every pair of a score and an id
LOW_WORD = tl.constexpr(0xFFFFFFFF)


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
def load_top_p(parameters, position):
    """Return the fp32 top_p of the token after `position`; 1 keeps all."""
    top_p, decay = load_float(parameters, TOP_P), load_float(parameters, TOP_P_DECAY)
    now = top_p
    if decay > 0:
        new = tl.maximum(position + 1 - tl.load(parameters + PROMPT_LENGTH), 0).to(tl.float64)
        now = tl.maximum(top_p * tl.exp2(new * tl.log2(decay)), load_float(parameters, TOP_P_BOUND))
    return tl.where(top_p > 0, now, 1.0).to(tl.float32)


@triton.jit
def load_choice(parameters, position):
    """Return (temperature, 1 if greedy; whether greedy; top_k, 0 for all; top_p, 1 for all)."""
    temperature, top_k = load_float(parameters, TEMPERATURE).to(tl.float32), tl.load(parameters + TOP_K)
    greedy = (temperature == 0) | (top_k == 1)
    return tl.where(greedy, 1.0, temperature), greedy, top_k, load_top_p(parameters, position)


@triton.jit
def is_filtered(greedy, top_k, top_p):
    """Return whether top-k or top-p may keep fewer tokens than all."""
    return (greedy == 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def gumbel(parameters, position, first, CHUNK: tl.constexpr):
    """Return the noise of ids `first` to `first + CHUNK`, fp32, equal to that of the reference."""
    k0, k1 = tl.load(parameters + KEY).to(tl.uint32), tl.load(parameters + KEY + 1).to(tl.uint32)
    block = (first // 4 + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox(k0, k1, block, zero + position.to(tl.uint32), zero, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CHUNK,))  # word 2 i + j is at [i, j]
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def load_chunk(line, ids, width, vocab_size):
    """Return logits in fp32, -inf where an id is not a token. The bound is that of memory, so that a thread's
    neighbours share one access."""
    values = tl.load(line + ids, mask=ids < width, other=0.0).to(tl.float32)
    return tl.where(ids < vocab_size, values, float("-inf"))


@triton.jit
def store_best(pairs, out, count):
    """Write the largest `count` of the pairs in descending order. Pairs differ from each other, but for LAST."""
    for place in range(count):
        best = tl.max(pairs, 0)
        tl.store(out + place, best)
        pairs = tl.where(pairs == best, LAST, pairs)


@triton.jit(do_not_specialize=["vocab_size", "columns", "alternatives"])
def chunk_kernel(
    measured, edited, measured_stride, edited_stride, measured_width, edited_width,
    parameters, positions, tokens, slots, terms, best, top, vocab_size, columns, alternatives,
    EDITED: tl.constexpr, FILTERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce a chunk of a row.

    terms: fp32 `[B, 3, C]`: largest measured logit; sum of exponentials relative to it, NaN where a logit is NaN or
    plus infinity; largest edited logit;
    best: int64 `[B, C]`, the pair of the best score, LAST for a row that is filtered;
    top: int64 `[B, C, alternatives]`, the pairs of the largest measured logits.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks, slot = tl.num_programs(0), tl.load(slots + row)
    first = chunk * CHUNK
    ids = first + tl.arange(0, CHUNK)
    token = ids < vocab_size
    values = load_chunk(measured + row * measured_stride, ids, measured_width, columns)
    broken = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0)
    line = parameters + slot * ROW
    if EDITED:
        colon = tl.load(line + COLON)
        banned = (colon >= 0) & (colon == tl.load(tokens + slot))
        values = tl.where(banned & (ids == tl.load(line + NEWLINE)), float("-inf"), values)
    largest = tl.max(values, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(terms + (row * 3) * chunks + chunk, largest)
    total = tl.sum(weight_of(values, base), 0)
    total = tl.where(broken == 1, float("nan"), (total.to(tl.float64) / WEIGHT).to(tl.float32))
    tl.store(terms + (row * 3 + 1) * chunks + chunk, total)
    pairs = tl.where(ids < columns, paired(values, ids), LAST)
    store_best(pairs, top + (row * chunks + chunk) * alternatives, alternatives)
    values = tl.where(token, values, float("-inf"))
    if EDITED:
        values = load_chunk(edited + row * edited_stride, ids, edited_width, vocab_size)
    tl.store(terms + (row * 3 + 2) * chunks + chunk, tl.max(values, 0))
    position = tl.load(positions + slot)
    temperature, greedy, top_k, top_p = load_choice(line, position)
    pair = LAST
    if not (FILTERS & is_filtered(greedy, top_k, top_p)):
        score = values
        if not greedy:
            score = tl.div_rn(values, temperature) + gumbel(line, position, first, CHUNK)
        pair = tl.max(tl.where(token, paired(score, ids), LAST), 0)
    tl.store(best + row * chunks + chunk, pair)


@triton.jit(do_not_specialize=["chunks", "alternatives"])
def join_kernel(
    measured, measured_stride, terms, best, top, tokens, logprobs, top_ids, top_logprobs, chunks, alternatives,
    CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the token of a row, its log-probability and the alternatives, from what its chunks found."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    peaks = tl.load(terms + row * 3 * chunks + chunk, mask=inside, other=float("-inf"))
    sums = tl.load(terms + (row * 3 + 1) * chunks + chunk, mask=inside, other=0.0)
    largest = tl.max(peaks, 0)
    total = tl.sum((sums * tl.exp(peaks - largest) * WEIGHT + 0.5).to(tl.int64), 0)
    normalizer = tl.log((total.to(tl.float64) / WEIGHT).to(tl.float32))
    normalizer = tl.where(tl.max((sums != sums).to(tl.int32), 0) == 1, float("nan"), normalizer)
    pair = tl.max(tl.load(best + row * chunks + chunk, mask=inside, other=LAST), 0)
    token = tl.where(pair == LAST, 0, id_of(pair))
    tl.store(tokens + row, token)
    logit = tl.load(measured + row * measured_stride + token).to(tl.float32)
    tl.store(logprobs + row, (logit - largest) - normalizer)
    candidate = tl.arange(0, CANDIDATES)
    count = chunks * alternatives
    pairs = tl.load(top + row * count + candidate, mask=candidate < count, other=LAST)
    for place in range(alternatives):
        pair = tl.max(pairs, 0)
        pairs = tl.where(pairs == pair, LAST, pairs)
        tl.store(top_ids + row * alternatives + place, id_of(pair))
        tl.store(top_logprobs + row * alternatives + place, (value_of(pair) - largest) - normalizer)


def launch_sample(
    measured: Tensor, edited: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant,
    columns: int,
) -> Sampled:  # fmt: skip
    """Return the tokens chosen from `edited`, the logits after all rules, and their log-probabilities under `measured`,
    the logits before; both `[B, V]` with adjacent columns, the same tensor where the variant has no rules. columns: as
    of `sample`."""
    from dtgpt.ops.sampling.filter_kernels import launch_filters

    rows, device = len(slots), measured.device
    count = min(variant.alternatives, columns)
    chunks = triton.cdiv(columns, CHUNK)
    terms = torch.empty(rows, 3, chunks, device=device)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    top = torch.empty(rows, chunks, count, dtype=torch.int64, device=device)
    chunk_kernel[(chunks, rows)](
        measured, edited, measured.stride(0), edited.stride(0), measured.shape[1], edited.shape[1],
        sequences.parameters, sequences.position, sequences.token, slots, terms, best, top, vocab_size, columns, count,
        EDITED=edited is not measured, FILTERS=variant.filters, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    if variant.filters:
        launch_filters(edited, sequences, slots, vocab_size, terms, best)
    sampled = Sampled(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, count, dtype=torch.int64, device=device),
        torch.empty(rows, count, device=device),
    )
    candidates = triton.next_power_of_2(max(chunks * count, 1))
    join_kernel[(rows,)](
        measured, measured.stride(0), terms, best, top, *sampled, chunks, count,
        CHUNKS=triton.next_power_of_2(chunks), CANDIDATES=candidates,
        num_warps=WARPS if candidates <= 4096 else 4 * WARPS,
    )  # fmt: skip
    return sampled
