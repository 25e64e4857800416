"""Triton kernel of the rules of `dtgpt.inference.rules.edits`. Needs Triton.

A rule concerns few ids, so one program a row changes those in a copy of the logits, in the order of the rules.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.sampling.primitives import COLON, NEWLINE, PROMPT_LENGTH, ROW, load_float
from dtgpt.ops.sampling.sequences import MOST_BIASES, MOST_ENDINGS, SIZES, Floats, Integers, Sequences, Variant

WARPS = 8
BLOCK = 256  # tokens of a sequence that a program takes at once
COMPARED = 32  # tokens that are compared with a block at once

NGRAM = tl.constexpr(Integers._fields.index("ngram"))
MIN_NEW_TOKENS = tl.constexpr(Integers._fields.index("min_new_tokens"))
PAIRED_NEWLINE = tl.constexpr(Integers._fields.index("paired_newline"))
FREQUENCY = tl.constexpr(SIZES[0] + Floats._fields.index("frequency_penalty"))
PRESENCE = tl.constexpr(SIZES[0] + Floats._fields.index("presence_penalty"))
REPETITION = tl.constexpr(SIZES[0] + Floats._fields.index("repetition_penalty"))
BIAS_IDS, BIASES = tl.constexpr(sum(SIZES[:2])), tl.constexpr(MOST_BIASES)
ENDING_IDS, ENDINGS = tl.constexpr(sum(SIZES[:4])), tl.constexpr(MOST_ENDINGS)
BIAS_LANES = tl.constexpr(triton.next_power_of_2(MOST_BIASES))
ENDING_LANES = tl.constexpr(triton.next_power_of_2(MOST_ENDINGS))


@triton.jit
def ban(line, token, banned):
    """Set the logit of a token, or of each of several, to -inf where banned."""
    tl.store(line + token, float("-inf"), mask=banned)


@triton.jit
def penalize_repetitions(line, logits, history, length, penalty, BLOCK: tl.constexpr):
    """Scale the logits of all tokens of the sequence. What is stored follows from the model's logit, and not from what
    the line has, so that a token that occurs twice is scaled once."""
    for first in range(0, length, BLOCK):
        place = first + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < length, other=0)
        value = tl.load(logits + token, mask=place < length, other=0.0).to(tl.float32)
        scaled = tl.where(value > 0, tl.div_rn(value, penalty), value * penalty)
        tl.store(line + token, scaled, mask=place < length)


@triton.jit
def add_bias(line, parameters):
    """Add the logit bias; entries that are not in use have the value 0."""
    entry = tl.arange(0, BIAS_LANES)
    token = tl.load(parameters + BIAS_IDS + entry, mask=entry < BIASES, other=0)
    bits = tl.load(parameters + BIAS_IDS + BIASES + entry, mask=entry < BIASES, other=0)
    bias = bits.to(tl.float64, bitcast=True).to(tl.float32)
    used = bias != 0
    tl.store(line + token, tl.load(line + token, mask=used, other=0.0) + bias, mask=used)


@triton.jit
def penalize(line, history, start, end, frequency, presence, BLOCK: tl.constexpr, COMPARED: tl.constexpr):
    """Subtract the penalties of the tokens at `start` to `end - 1`, at the first place of each."""
    for first in range(start, end, COMPARED):
        place = first + tl.arange(0, COMPARED)
        token = tl.load(history + place, mask=place < end, other=-1)
        count, earlier = tl.zeros((COMPARED,), tl.int32), tl.zeros((COMPARED,), tl.int32)
        for begin in range(start, end, BLOCK):
            other_place = begin + tl.arange(0, BLOCK)
            other = tl.load(history + other_place, mask=other_place < end, other=-2)
            same = token[:, None] == other[None, :]
            count += tl.sum(same.to(tl.int32), 1)
            earlier += tl.sum((same & (other_place[None, :] < place[:, None])).to(tl.int32), 1)
        chosen = (earlier == 0) & (place < end)
        # The product is exact in float64, so that it is rounded once, apart from the difference.
        penalty = (count.to(tl.float64) * frequency.to(tl.float64)).to(tl.float32)
        value = tl.load(line + token, mask=chosen, other=0.0)
        tl.store(line + token, value - penalty - presence, mask=chosen)


@triton.jit
def ban_repeated_ngrams(line, history, length, n, BLOCK: tl.constexpr):
    """Ban the tokens that end an n-gram whose other tokens are the last ones of the sequence."""
    for first in range(n - 1, length, BLOCK):
        place = first + tl.arange(0, BLOCK)
        same = place < length
        for back in range(1, n):
            before = tl.load(history + place - back, mask=same, other=-1)
            same = same & (before == tl.load(history + length - back))
        ban(line, tl.load(history + place, mask=same, other=0), same)


@triton.jit(do_not_specialize=["positions"])
def edit_kernel(
    edited,
    edited_stride,
    logits,
    stride,
    tokens,
    places,
    history,
    positions,
    parameters,
    slots,
    EDITS: tl.constexpr,
    NGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Apply the rules to a row of `edited`, fp32 `[B, V]`, a copy of the logits. history: `[S, positions]`; places:
    that of each last token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    line, rules, past = edited + row * edited_stride, parameters + slot * ROW, history + slot * positions
    token, length = tl.load(tokens + slot), (tl.load(places + slot) + 1).to(tl.int32)
    start = tl.load(rules + PROMPT_LENGTH).to(tl.int32)
    if EDITS:
        repetition = load_float(rules, REPETITION).to(tl.float32)
        if (repetition != 0) & (repetition != 1):  # first, though a rule of newlines comes before: it leaves -inf as is
            penalize_repetitions(line, logits + row * stride, past, length, repetition, BLOCK)
        tl.debug_barrier()
        colon, newline = tl.load(rules + COLON), tl.load(rules + NEWLINE)
        ban(line, newline, (colon >= 0) & (token == colon))
        tl.debug_barrier()  # between rules: an id may belong to another thread in each
        add_bias(line, rules)
        tl.debug_barrier()
        frequency = load_float(rules, FREQUENCY).to(tl.float32)
        presence = load_float(rules, PRESENCE).to(tl.float32)
        if (frequency != 0) | (presence != 0):
            penalize(line, past, start, length, frequency, presence, BLOCK, COMPARED)
        tl.debug_barrier()
        early = length - start < tl.load(rules + MIN_NEW_TOKENS)
        entry = tl.arange(0, ENDING_LANES)
        ending = tl.load(rules + ENDING_IDS + entry, mask=entry < ENDINGS, other=-1)
        ending = tl.where(early, ending, -1)
        ban(line, ending, ending >= 0)
        paired = tl.load(rules + PAIRED_NEWLINE)
        ban(line, paired, early & (paired >= 0) & (token == paired))
    if NGRAMS:
        n = tl.load(rules + NGRAM).to(tl.int32)
        if n > 0:
            ban_repeated_ngrams(line, past, length, n, BLOCK)


def launch_edits(logits: Tensor, sequences: Sequences, slots: Tensor, variant: Variant) -> Tensor:
    """Return logits `[B, V]` in fp32 after all rules."""
    edited = logits.to(torch.float32, copy=True).contiguous()
    token, position, history, parameters, _ = sequences
    edit_kernel[(len(slots),)](
        edited,
        edited.stride(0),
        logits,
        logits.stride(0),
        token,
        position,
        history,
        history.shape[1],
        parameters,
        slots,
        EDITS=variant.edits,
        NGRAMS=variant.ngram > 0,
        BLOCK=BLOCK,
        COMPARED=COMPARED,
        num_warps=WARPS,
    )
    return edited
