"""Triton kernels of top-k, top-p and min-p, for `kernels`. Needs Triton.

Nothing is sorted. Chunks of a row count their logits, and sum their probabilities, in bins of the distance from the
largest logit. One program a row then knows the bins where top-k and top-p end, copies the few logits in them, and finds
both ends by binary search over the ordered bits of the copies. All sums are of whole numbers, so they have no order.
Where min-p ends is a binary search over the bits of a logit alone. Last, chunks draw from what stays.

A sum of probabilities is rounded once, at its end; that of the reference has terms that are rounded. Both keep the same
ids unless a sum is within about 1e-7 of top_p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.sampling.primitives import (
    CHUNK,
    PROMPT_LENGTH,
    ROW,
    WARPS,
    best_draw,
    load_chunk,
    load_float,
    ordered,
    unordered,
    weight_of,
)
from dtgpt.ops.sampling.sequences import Floats, Integers, Sequences

TOP_K = tl.constexpr(Integers._fields.index("top_k"))
TEMPERATURE = tl.constexpr(len(Integers._fields) + Floats._fields.index("temperature"))
TOP_P = tl.constexpr(len(Integers._fields) + Floats._fields.index("top_p"))
TOP_P_DECAY = tl.constexpr(len(Integers._fields) + Floats._fields.index("top_p_decay"))
TOP_P_BOUND = tl.constexpr(len(Integers._fields) + Floats._fields.index("top_p_bound"))
MIN_P = tl.constexpr(len(Integers._fields) + Floats._fields.index("min_p"))

BINS = 64  # eight for each octave of 1 + distance / temperature, up to 2^8
GROUP, BIN_WARPS = 8, 8  # bins that a program counts at once
BLOCK, SEARCH, ROW_WARPS = 8192, 2048, 16  # logits and copies that the program of a row takes at once

SHIFT = tl.constexpr(20)  # leaves the exponent and three bits of the mantissa
ONE = tl.constexpr(0x3F800000)  # bits of 1.0
COUNT = tl.constexpr(1 << 52)  # of a logit in a bin, above the sum of 2^10 weights
MARGIN = tl.constexpr(1e-6)  # above the rounding of a sum of probabilities to fp32
LOWEST, HIGHEST = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000)  # ordered bits of -inf and inf
SMALLEST, LARGEST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)


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
def is_filtered(parameters, greedy, top_k, top_p):
    """Return whether top-k, top-p or min-p may keep fewer tokens than all."""
    return (greedy == 0) & ((top_k > 0) | (top_p < 1) | (load_float(parameters, MIN_P) > 0))


@triton.jit
def bin_of(scaled, peak, LAST_BIN: tl.constexpr):
    """Return the bin of logits / temperature, 0 for those near the peak. Exact, so that two kernels agree."""
    distance = 1.0 + (peak - scaled)
    return tl.minimum((distance.to(tl.int32, bitcast=True) - ONE) >> SHIFT, LAST_BIN)


@triton.jit
def load_peak(terms, row, chunks, temperature, CHUNKS: tl.constexpr):
    """Return the largest edited logit of a row / temperature."""
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(terms + (row * 3 + 2) * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    return tl.div_rn(tl.max(peaks, 0), temperature)


@triton.jit(do_not_specialize=["vocab_size"])
def bins_kernel(
    edited, stride, width, parameters, positions, slots, terms, bins, vocab_size,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write what the bins of a chunk hold, int64 `[B, C, BINS]`, for rows that are filtered: the number of logits times
    COUNT, plus the sum of their weights."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks, slot = tl.num_programs(0), tl.load(slots + row)
    temperature, greedy, top_k, top_p = load_choice(parameters + slot * ROW, tl.load(positions + slot))
    if is_filtered(parameters + slot * ROW, greedy, top_k, top_p):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        peak = load_peak(terms, row, chunks, temperature, CHUNKS)
        scaled = tl.div_rn(load_chunk(edited + row * stride, ids, width, vocab_size), temperature)
        place = tl.where(ids < vocab_size, bin_of(scaled, peak, BINS - 1), BINS)
        content = weight_of(scaled, peak) + COUNT
        for first in tl.static_range(0, BINS, GROUP):
            group = first + tl.arange(0, GROUP)
            hit = place[:, None] == group[None, :]
            tl.store(bins + (row * chunks + chunk) * BINS + group, tl.sum(tl.where(hit, content[:, None], 0), 0))


@triton.jit
def fits(mass, total, top_p):
    """Return whether a sum of weights, as a probability in fp32, is at most top_p."""
    return (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32) <= top_p


@triton.jit
def collect(line, width, vocab_size, copies, temperature, peak, start, end, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the ordered bits of the logits in bins `start` to `end`; return how many there are."""
    count = tl.zeros((), tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = load_chunk(line, ids, width, vocab_size)
        place = bin_of(tl.div_rn(values, temperature), peak, BINS - 1)
        hit = (ids < vocab_size) & (place >= start) & (place <= end)
        hits = hit.to(tl.int32)
        tl.store(copies + count + tl.cumsum(hits, 0) - 1, ordered(values), mask=hit)
        count += tl.sum(hits, 0)
    tl.debug_barrier()  # other threads read what one thread has written
    return count


@triton.jit
def weigh(copies, weights, count, temperature, peak, SEARCH: tl.constexpr):
    """Write the weights of the copies; return the smallest and the largest copy."""
    smallest, largest = tl.full((), LARGEST, tl.int32), tl.full((), SMALLEST, tl.int32)
    for first in range(0, count, SEARCH):
        at = first + tl.arange(0, SEARCH)
        inside = at < count
        bits = tl.load(copies + at, mask=inside, other=0)
        tl.store(weights + at, weight_of(tl.div_rn(unordered(bits), temperature), peak), mask=inside)
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, bits, LARGEST), 0))
        largest = tl.maximum(largest, tl.max(tl.where(inside, bits, SMALLEST), 0))
    tl.debug_barrier()
    return smallest, largest


@triton.jit
def count_from(copies, count, least, SEARCH: tl.constexpr):
    """Return how many copies are `least` or more."""
    found = tl.zeros((), tl.int32)
    for first in range(0, count, SEARCH):
        at = first + tl.arange(0, SEARCH)
        bits = tl.load(copies + at, mask=at < count, other=0)
        found += tl.sum(((bits >= least) & (at < count)).to(tl.int32), 0)
    return found


@triton.jit
def weigh_from(copies, weights, count, least, SEARCH: tl.constexpr):
    """Return the sum of the weights of the copies that are `least` or more."""
    found = tl.zeros((), tl.int64)
    for first in range(0, count, SEARCH):
        at = first + tl.arange(0, SEARCH)
        bits = tl.load(copies + at, mask=at < count, other=0)
        weight = tl.load(weights + at, mask=at < count, other=0)
        found += tl.sum(tl.where(bits >= least, weight, 0), 0)
    return found


@triton.jit
def middle(low, high):
    """Return the mean of two int32 numbers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def min_p_edge(min_p, temperature, peak):
    """Return the ordered bits of the smallest logit whose probability is at least min_p times the largest."""
    low, high = tl.full((), LOWEST, tl.int32), tl.full((), HIGHEST, tl.int32)  # `high` keeps the rule, `low` does not
    if min_p > 0:
        distance = tl.log(min_p).to(tl.float32)
        while low + 1 < high:
            half = middle(low, high)
            likely = tl.div_rn(unordered(half), temperature) - peak >= distance
            low, high = tl.where(likely, low, half), tl.where(likely, half, high)
    else:
        high = low
    return high


@triton.jit
def id_of_tie(line, width, vocab_size, edge, number, BLOCK: tl.constexpr):
    """Return the id of the tie of this number, from 1, among the logits with the ordered bits `edge`."""
    ties, found = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        tie = ((ordered(load_chunk(line, ids, width, vocab_size)) == edge) & (ids < vocab_size)).to(tl.int32)
        hit = (ties + tl.cumsum(tie, 0) == number) & (tie == 1)
        found += tl.sum(tl.where(hit, ids, 0), 0)
        ties += tl.sum(tie, 0)
    return found


@triton.jit(do_not_specialize=["vocab_size", "chunks"])
def filter_kernel(
    edited, stride, width, parameters, positions, slots, terms, bins, copies, weights, edges, vocab_size, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Write what stays of a row that is filtered, edges int32 `[B, 2]`: the ordered bits of the smallest logit, and the
    largest id where a logit is equal to it. copies int32, weights int64 `[B, C x CHUNK]`: memory to work in."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature, greedy, top_k, top_p = load_choice(parameters + slot * ROW, tl.load(positions + slot))
    if is_filtered(parameters + slot * ROW, greedy, top_k, top_p):
        line, base = edited + row * stride, row * chunks * CHUNK
        peak = load_peak(terms, row, chunks, temperature, CHUNKS)
        place, chunk = tl.arange(0, BINS), tl.arange(0, CHUNKS)
        tile = (row * chunks + chunk[:, None]) * BINS + place[None, :]
        content = tl.load(bins + tile, mask=(chunk < chunks)[:, None] & (place >= 0)[None, :], other=0)
        counts, masses = tl.sum(content // COUNT, 0), tl.sum(content % COUNT, 0)

        # The bins to look into: `last`, where top-k ends, and those where top-p may end, whatever top-k leaves.
        k = tl.minimum(tl.where(top_k > 0, top_k, vocab_size), vocab_size)
        last = tl.sum((tl.cumsum(counts, 0) < k).to(tl.int32), 0)
        fewest = tl.sum(tl.where((place < last) | (k == vocab_size), masses, 0), 0).to(tl.float64)
        most = tl.sum(tl.where(place <= last, masses, 0), 0).to(tl.float64)
        nearer = (tl.cumsum(masses, 0) - masses).to(tl.float64)
        stay = (nearer <= (top_p - MARGIN) * fewest) & (place <= last)
        may_stay = (nearer <= (top_p + MARGIN) * most) & (place <= last)
        start, end = tl.max(tl.where(stay, place, 0), 0), tl.max(tl.where(may_stay, place, 0), 0)
        if k < vocab_size:
            start, end = tl.where(top_p < 1, tl.minimum(start, last), last), last
        before = tl.sum(tl.where(place < start, counts, 0), 0)
        mass_before = tl.sum(tl.where(place < start, masses, 0), 0)
        found = collect(line, width, vocab_size, copies + base, temperature, peak, start, end, BINS, BLOCK)
        low, high = weigh(copies + base, weights + base, found, temperature, peak, SEARCH)

        # Top-k: `edge` becomes the k-th largest logit. From `low` on there are k, not so above `high`.
        edge, total, largest = low, tl.sum(masses, 0), high
        if k < vocab_size:
            while low < high:
                half = middle(low, high) + 1
                enough = before + count_from(copies + base, found, half, SEARCH) >= k
                low, high = tl.where(enough, half, low), tl.where(enough, high, half - 1)
            edge = low
            total = mass_before + weigh_from(copies + base, weights + base, found, edge, SEARCH)

        # Top-p: what is above `edge` fits, and not what is above less. Of equal logits the first ones stay.
        last_id = tl.full((), LARGEST, tl.int32)
        if top_p < 1:
            low, high = edge - 1, largest
            while low + 1 < high:
                half = middle(low, high)
                above = mass_before + weigh_from(copies + base, weights + base, found, half + 1, SEARCH)
                fit = fits(above, total, top_p)
                low, high = tl.where(fit, low, half), tl.where(fit, half, high)
            edge = high
            above = mass_before + weigh_from(copies + base, weights + base, found, edge + 1, SEARCH)
            weight = weight_of(tl.div_rn(unordered(edge), temperature), peak)
            ties = count_from(copies + base, found, edge, SEARCH) - count_from(copies + base, found, edge + 1, SEARCH)
            fewer, more = tl.full((), 1, tl.int32), ties
            while fewer < more:
                half = middle(fewer, more) + 1
                fit = fits(above + (half - 1) * weight, total, top_p)
                fewer, more = tl.where(fit, half, fewer), tl.where(fit, more, half - 1)
            if fewer < ties:
                last_id = id_of_tie(line, width, vocab_size, edge, fewer, BLOCK)

        # Min-p: a logit below `least` is not likely enough, whatever the filters before it keep.
        least = min_p_edge(load_float(parameters + slot * ROW, MIN_P), temperature, peak)
        last_id = tl.where(least > edge, LARGEST, last_id)
        edge = tl.maximum(edge, least)
        tl.store(edges + row * 2, edge)
        tl.store(edges + row * 2 + 1, last_id)


@triton.jit(do_not_specialize=["vocab_size"])
def draw_kernel(edited, stride, width, parameters, positions, slots, edges, best, vocab_size, CHUNK: tl.constexpr):
    """Write the best pair of a chunk, int64 `[B, C]`, of rows that are filtered."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    line, position = parameters + slot * ROW, tl.load(positions + slot)
    temperature, greedy, top_k, top_p = load_choice(line, position)
    if is_filtered(line, greedy, top_k, top_p):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_chunk(edited + row * stride, ids, width, vocab_size)
        bits, edge, last_id = ordered(values), tl.load(edges + row * 2), tl.load(edges + row * 2 + 1)
        stays = (ids < vocab_size) & ((bits > edge) | ((bits == edge) & (ids <= last_id)))
        pair = best_draw(line, position, chunk * CHUNK, values, stays, temperature, CHUNK)
        tl.store(best + row * tl.num_programs(0) + chunk, pair)


def find_edges(edited: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, terms: Tensor) -> Tensor:
    """Return what stays of rows that are filtered, int32 `[B, 2]` as of `filter_kernel`; edited, terms: as of
    `chunk_kernel`."""
    rows, _, chunks = terms.shape
    bins = torch.empty(rows, chunks, BINS, dtype=torch.int64, device=edited.device)
    copies = torch.empty(rows, chunks * CHUNK, dtype=torch.int32, device=edited.device)
    weights = torch.empty(copies.shape, dtype=torch.int64, device=edited.device)
    edges = torch.empty(rows, 2, dtype=torch.int32, device=edited.device)
    common = edited, edited.stride(0), edited.shape[1], sequences.parameters, sequences.position, slots, terms
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks), "BINS": BINS}
    bins_kernel[(chunks, rows)](*common, bins, vocab_size, **sizes, GROUP=GROUP, num_warps=BIN_WARPS)
    filter_kernel[(rows,)](
        *common, bins, copies, weights, edges, vocab_size, chunks, **sizes, BLOCK=BLOCK, SEARCH=SEARCH,
        num_warps=ROW_WARPS,
    )  # fmt: skip
    return edges


def launch_filters(
    edited: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, terms: Tensor, best: Tensor
) -> None:
    """Write the best pairs, int64 `[B, C]`, of rows that are filtered; other arguments: as of `find_edges`."""
    edges = find_edges(edited, sequences, slots, vocab_size, terms)
    rows, chunks = best.shape
    draw_kernel[(chunks, rows)](
        edited, edited.stride(0), edited.shape[1], sequences.parameters, sequences.position, slots, edges, best,
        vocab_size, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
