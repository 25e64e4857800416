"""Triton kernels of top-k and top-p, for `dtgpt.ops.sampling.kernels`. Needs Triton.

Nothing is sorted. Chunks of a row count their logits, and sum their probabilities, in bins of the distance from the
largest logit. One program a row then knows the bins where top-k and top-p end, copies the few logits in them, and finds
both ends by binary search over the ordered bits of the copies. The sums that decide are of whole numbers, as in the
reference; those of bins only tell where to look, within a margin above their rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.sampling.kernels import (
    CHUNK, LAST, ROW, WARPS, is_filtered, load_choice, load_chunk, ordered, paired, unordered,
)  # fmt: skip
from dtgpt.ops.sampling.sequences import Sequences

BINS = 64  # eight for each octave of 1 + distance / temperature, up to 2^8
GROUP = 16  # bins that a program counts at once
BLOCK = 4096  # logits that the program of a row takes at once
ROW_WARPS = 16

SHIFT = tl.constexpr(20)  # leaves exponent and three bits of the mantissa
ONE = tl.constexpr(0x3F800000)  # bits of 1.0
UNIT = tl.constexpr(2.0**60)  # of whole numbers that stand for probabilities
MARGIN = tl.constexpr(1e-5)  # of sums over bins
EVERYTHING = tl.constexpr(-(1 << 31))  # below the ordered bits of every value but NaN


@triton.jit
def bin_of(scaled, peak, LARGEST: tl.constexpr):
    """Return the bin of logits / temperature, 0 for those near the peak. Exact, so that two kernels agree."""
    distance = 1.0 + (peak - scaled)
    return tl.minimum((distance.to(tl.int32, bitcast=True) - ONE) >> SHIFT, LARGEST)


@triton.jit
def load_peak(terms, row, chunks, temperature, CHUNKS: tl.constexpr):
    """Return the largest edited logit of a row / temperature."""
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(terms + (row * 3 + 2) * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    return tl.div_rn(tl.max(peaks, 0), temperature)


@triton.jit(do_not_specialize=["vocab_size"])
def bins_kernel(
    edited, stride, width, parameters, positions, slots, terms, counts, sums, vocab_size,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write how many logits of a chunk are in each bin, counts int32 `[B, C, BINS]`, and the sums of their
    exponentials relative to the row's peak, sums fp32 `[B, C, BINS]`, for rows that are filtered."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks, slot = tl.num_programs(0), tl.load(slots + row)
    temperature, greedy, top_k, top_p = load_choice(parameters + slot * ROW, tl.load(positions + slot))
    if is_filtered(greedy, top_k, top_p):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        peak = load_peak(terms, row, chunks, temperature, CHUNKS)
        scaled = tl.div_rn(load_chunk(edited + row * stride, ids, width, vocab_size), temperature)
        bins = tl.where(ids < vocab_size, bin_of(scaled, peak, BINS - 1), BINS)
        weights = tl.exp(scaled - peak)
        for first in tl.static_range(0, BINS, GROUP):
            group = first + tl.arange(0, GROUP)
            hit = bins[:, None] == group[None, :]
            place = (row * chunks + chunk) * BINS + group
            tl.store(counts + place, tl.sum(hit.to(tl.int32), 0))
            tl.store(sums + place, tl.sum(tl.where(hit, weights[:, None], 0.0), 0))


@triton.jit
def whole(weights, total):
    """Return probabilities weights / total, rounded to fp32, as whole numbers."""
    return (tl.div_rn(weights, total).to(tl.float64) * UNIT).to(tl.int64)


@triton.jit
def fits(mass, top_p):
    """Return whether a sum of whole numbers, rounded to fp32 as a probability, is at most top_p."""
    return (mass.to(tl.float64) / UNIT).to(tl.float32) <= top_p


@triton.jit
def collect(
    line, width, vocab_size, scratch, temperature, peak, total, nearest, farthest, least,
    SUM: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the logits in bins `nearest` to `farthest` whose ordered bits are `least` or more. Return how many there
    are, and the sum of the probabilities in nearer bins if it is asked for."""
    count, before = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = load_chunk(line, ids, width, vocab_size)
        scaled = tl.div_rn(values, temperature)
        bins = tl.where(ids < vocab_size, bin_of(scaled, peak, BINS - 1), BINS)
        hit = (bins >= nearest) & (bins <= farthest) & (ordered(values) >= least)
        hits = hit.to(tl.int32)
        tl.store(scratch + count + tl.cumsum(hits, 0) - 1, values, mask=hit)
        count += tl.sum(hits, 0)
        if SUM:
            before += tl.sum(tl.where(bins < nearest, whole(tl.exp(scaled - peak), total), 0), 0)
    tl.debug_barrier()  # other threads read what one thread has written
    return count, before


@triton.jit
def bounds(scratch, count, BLOCK: tl.constexpr):
    """Return the smallest and the largest ordered bits of the copies."""
    smallest, largest = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), EVERYTHING, tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        bits = ordered(tl.load(scratch + at, mask=at < count, other=0.0))
        smallest = tl.minimum(smallest, tl.min(tl.where(at < count, bits, 0x7FFFFFFF), 0))
        largest = tl.maximum(largest, tl.max(tl.where(at < count, bits, EVERYTHING), 0))
    return smallest, largest


@triton.jit
def middle(low, high):
    """Return the mean of two int32 numbers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def count_from(scratch, count, least, BLOCK: tl.constexpr):
    """Return how many copies have ordered bits of `least` or more."""
    found = tl.zeros((), tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        bits = ordered(tl.load(scratch + at, mask=at < count, other=0.0))
        found += tl.sum(((bits >= least) & (at < count)).to(tl.int32), 0)
    return found


@triton.jit
def weigh_from(scratch, count, least, temperature, peak, BLOCK: tl.constexpr):
    """Return the sum of exponentials, float64, of the copies with ordered bits of `least` or more."""
    found = tl.zeros((), tl.float64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(scratch + at, mask=at < count, other=0.0)
        weights = tl.exp(tl.div_rn(values, temperature) - peak)
        found += tl.sum(tl.where((ordered(values) >= least) & (at < count), weights, 0.0).to(tl.float64), 0)
    return found


@triton.jit
def sum_above(scratch, count, bits, temperature, peak, total, BLOCK: tl.constexpr):
    """Return the sum of the probabilities, whole numbers, of the copies with ordered bits above `bits`."""
    found = tl.zeros((), tl.int64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(scratch + at, mask=at < count, other=0.0)
        shares = whole(tl.exp(tl.div_rn(values, temperature) - peak), total)
        found += tl.sum(tl.where((ordered(values) > bits) & (at < count), shares, 0), 0)
    return found


@triton.jit(do_not_specialize=["vocab_size", "chunks"])
def filter_kernel(
    edited, stride, width, parameters, positions, slots, terms, counts, sums, copies, scores, best, vocab_size, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the best pair of a row that is filtered. copies: fp32 `[B, C x CHUNK]`, memory to work in."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature, greedy, top_k, top_p = load_choice(parameters + slot * ROW, tl.load(positions + slot))
    if is_filtered(greedy, top_k, top_p):
        line, scratch = edited + row * stride, copies + row * chunks * CHUNK
        peak = load_peak(terms, row, chunks, temperature, CHUNKS)
        bins, chunk = tl.arange(0, BINS), tl.arange(0, CHUNKS)
        tile = row * chunks * BINS + chunk[:, None] * BINS + bins[None, :]
        inside = (chunk < chunks)[:, None] & (bins >= 0)[None, :]
        count = tl.sum(tl.load(counts + tile, mask=inside, other=0), 0)
        mass = tl.sum(tl.load(sums + tile, mask=inside, other=0.0).to(tl.float64), 0)

        # Top-k: `least`, the ordered bits of the k-th largest logit, which is in bin `last`.
        least, last, total = tl.full((), EVERYTHING, tl.int32), tl.full((), BINS - 1, tl.int32), tl.sum(mass, 0)
        if (top_k > 0) & (top_k < vocab_size):
            k = top_k.to(tl.int32)
            last = tl.sum((tl.cumsum(count, 0) < k).to(tl.int32), 0)
            nearer = tl.sum(tl.where(bins < last, count, 0), 0)
            found, _ = collect(
                line, width, vocab_size, scratch, temperature, peak, 1.0, last, last, EVERYTHING, False, BINS, BLOCK
            )
            low, high = bounds(scratch, found, BLOCK)
            while low < high:  # count from `low` on is enough, and not above `high`
                half = middle(low, high) + 1
                enough = nearer + count_from(scratch, found, half, BLOCK) >= k
                low, high = tl.where(enough, half, low), tl.where(enough, high, half - 1)
            least = low
            total = tl.sum(tl.where(bins < last, mass, 0.0), 0)
            total += weigh_from(scratch, found, least, temperature, peak, BLOCK)
            tl.debug_barrier()  # all threads have read the copies

        # Top-p: all above `edge` stay, and of those at `edge` the first ones.
        edge, above, share = least, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if top_p < 1:
            normalizer = total.to(tl.float32)
            nearer_mass = (tl.cumsum(mass, 0) - mass) / total
            sure = (nearer_mass <= top_p - MARGIN) & (bins <= last)
            possible = (nearer_mass <= top_p + MARGIN) & (bins <= last)
            nearest = tl.max(tl.where(sure, bins, 0), 0)
            farthest = tl.max(tl.where(possible, bins, 0), 0)
            found, nearer_sum = collect(
                line, width, vocab_size, scratch, temperature, peak, normalizer, nearest, farthest, least, True, BINS, BLOCK
            )
            low, high = bounds(scratch, found, BLOCK)
            low -= 1
            while low + 1 < high:  # the sum above `high` fits; if that above `low` does, all copies stay
                half = middle(low, high)
                sum_half = nearer_sum + sum_above(scratch, found, half, temperature, peak, normalizer, BLOCK)
                fit = fits(sum_half, top_p)
                low, high = tl.where(fit, low, half), tl.where(fit, half, high)
            edge = high
            above = nearer_sum + sum_above(scratch, found, edge, temperature, peak, normalizer, BLOCK)
            share = whole(tl.exp(tl.div_rn(unordered(edge), temperature) - peak), normalizer)

        # The best score of those that stay, in the order of ids.
        ties, winner = tl.zeros((), tl.int64), tl.full((), LAST, tl.int64)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            token = ids < vocab_size
            bits = ordered(load_chunk(line, ids, width, vocab_size))
            tie = (token & (bits == edge)).to(tl.int64)
            rank = ties + tl.cumsum(tie, 0) - tie
            stays = (bits > edge) | ((bits == edge) & fits(above + rank * share, top_p))
            score = tl.load(scores + row * chunks * CHUNK + ids, mask=token, other=0.0)
            winner = tl.maximum(winner, tl.max(tl.where(stays & token, paired(score, ids), LAST), 0))
            ties += tl.sum(tie, 0)
        tl.store(best + row * chunks, winner)


def launch_filters(
    edited: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, terms: Tensor, best: Tensor, scores: Tensor
) -> None:
    """Write the best pairs, int64 `[B, C]`, of rows that are filtered; other arguments: as of `chunk_kernel`."""
    rows, chunks = best.shape
    counts = torch.empty(rows, chunks, BINS, dtype=torch.int32, device=edited.device)
    sums = torch.empty(rows, chunks, BINS, device=edited.device)
    common = edited, edited.stride(0), edited.shape[1], sequences.parameters, sequences.position, slots, terms
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks), "BINS": BINS}
    bins_kernel[(chunks, rows)](*common, counts, sums, vocab_size, **sizes, GROUP=GROUP, num_warps=WARPS)
    filter_kernel[(rows,)](
        *common, counts, sums, torch.empty_like(scores), scores, best, vocab_size, chunks, **sizes, BLOCK=BLOCK,
        num_warps=ROW_WARPS,
    )  # fmt: skip
