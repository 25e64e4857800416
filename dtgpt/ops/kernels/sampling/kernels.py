"""Triton kernels of `dtgpt.ops.sampling.sample`. Needs Triton.

A row of logits is cut into chunks, each the work of one program, so that one row alone keeps many multiprocessors busy:
the noise of an id takes a few dozen operations. A program per row then joins what the chunks found. Filters take two
kernels in between, those of `filter_kernels`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.sampling.filter_kernels import is_filtered, launch_filters, load_choice
from dtgpt.ops.kernels.sampling.primitives import (
    CHUNK,
    COLON,
    LAST,
    NEWLINE,
    ROW,
    WARPS,
    WEIGHT,
    best_draw,
    id_of,
    load_chunk,
    paired,
    value_of,
    weight_of,
)
from dtgpt.ops.sampling.sequences import Sampled, Sequences, Variant


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
    if alternatives > 0:
        pairs = tl.where(ids < columns, paired(values, ids), LAST)
        store_best(pairs, top + (row * chunks + chunk) * alternatives, alternatives)
    values = tl.where(token, values, float("-inf"))
    if EDITED:
        values = load_chunk(edited + row * edited_stride, ids, edited_width, vocab_size)
    tl.store(terms + (row * 3 + 2) * chunks + chunk, tl.max(values, 0))
    position = tl.load(positions + slot)
    temperature, greedy, top_k, top_p = load_choice(line, position)
    pair = LAST
    if not (FILTERS & is_filtered(line, greedy, top_k, top_p)):
        if greedy:
            pair = tl.max(tl.where(token, paired(values, ids), LAST), 0)
        else:
            pair = best_draw(line, position, first, values, token, temperature, CHUNK)
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
