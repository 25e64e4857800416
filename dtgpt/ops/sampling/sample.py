"""The next token of each sequence, as a function of its own logits, parameters and position alone.

A draw such as `torch.multinomial` takes from a generator's state, so that a text would depend on which other sequences
are in its batch.

The order of rules: logits in fp32; no newline after a colon; *log-probabilities are measured here*; repetition penalty;
logit bias; frequency and presence penalty; no repeated n-grams; no ending before `min_new_tokens`; the ids that the
host allows; the likeliest id if temperature is 0 or top_k 1; else temperature, top-k (ties with the k-th stay), top-p,
min-p, and a draw by the Gumbel-max trick. Its noise is a pure function of (key, position, id). The smallest id wins
among equals. If every id is banned, id 0 is chosen.

What is here runs where Triton does not, and is the oracle of the kernels. The result of a row depends on that row
alone, bit for bit: sums over the vocabulary are those of `log_softmax` and `softmax`, whose order is fixed by its size,
or sums of whole numbers, which have no order. Rules that change logits before a token is chosen are a capability's.
"""

import math

import torch
from torch import Tensor

from dtgpt.ops.operation import Operation
from dtgpt.ops.random.philox import uniform_rows
from dtgpt.ops.sampling.sequences import Parameters, Sampled, Sequences, Variant, unpack
from dtgpt.util import seams

UNIT = 2.0**60  # of the fixed-point numbers that probabilities are added as: sums have no rounding, thus no order


def sample_reference(
    logits: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant, columns: int | None = None
) -> Sampled:
    """Choose a token for each row, in plain torch; arguments and results are those of `sample`."""
    parameters = unpack(sequences.parameters[slots])
    values = logits[:, : columns or vocab_size].float()
    measured, edited = values, values
    for rule in seams.listed("logit_rules", variant):
        measured, edited = rule(measured, edited, sequences, slots, variant)
    edited = edited[:, :vocab_size]
    if variant.candidates:
        ids, logprobs = candidates_of(measured, edited, variant.alternatives)
        return Sampled(ids[:, 0], logprobs[:, 0], ids, logprobs)
    tokens = choose(edited, sequences.position[slots], parameters, variant.filters)
    return Sampled(tokens, *log_probabilities(measured, tokens, variant.alternatives))


def log_probabilities(values: Tensor, tokens: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities under values fp32 `[B, V]`: those of the tokens, `[B]`; the ids of the likeliest,
    `[B, alternatives]`; and theirs."""
    measured = log_softmax(values)
    top = likeliest(values, alternatives) if alternatives else tokens.new_empty(len(tokens), 0)
    return measured.gather(1, tokens[:, None])[:, 0], top, measured.gather(1, top)


def log_softmax(values: Tensor) -> Tensor:
    """Return the log-probabilities of values fp32 `[B, V]`. PyTorch's fp32 sums on CPUs without AVX-512 are 8e-5 off at
    50,257 columns: CPUs sum in fp64."""
    on_cpu = values.device.type == "cpu"
    return torch.log_softmax(values, dim=-1, dtype=torch.float64 if on_cpu else None).float()


def candidates_of(values: Tensor, edited: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities `[B, count]` of the likeliest tokens after the rules, which made `edited`, for
    the ids that may be drawn, of the values fp32 `[B, V]`. Log-probabilities change as the values did and are not
    normalised again, which is transformers' rule of beam search."""
    measured, values = (whole[:, : edited.shape[1]] for whole in (log_softmax(values), values))
    changed = torch.where(edited == values, measured, measured + (edited - values))
    top = likeliest(changed, count)
    return top, changed.gather(1, top)


def likeliest(values: Tensor, count: int) -> Tensor:
    """Return the ids int64 `[B, count]` of the largest values fp32 `[B, V]`, best first, smallest id among equals."""
    # An order of whole numbers that no two entries share: the bits of the value, then the id.
    bits = (values + 0.0).view(torch.int32).long()  # the sum makes -0 a 0
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[1], device=values.device)
    return ((rank << 32) - ids).topk(min(count, values.shape[1]), dim=1).indices


def choose(values: Tensor, position: Tensor, parameters: Parameters, filters: bool) -> Tensor:
    """Return the tokens int64 `[B]` for values fp32 `[B, V]`, all rules on logits applied."""
    floats, integers = parameters.floats, parameters.integers
    greedy = (floats.temperature == 0) | (integers.top_k == 1)
    temperature = torch.where(greedy, 1, floats.temperature.float())[:, None]
    scaled = values / temperature
    key = torch.stack([integers.key_0, integers.key_1], dim=-1)
    scores = scaled + gumbel(key, position, values.shape[1])
    if filters:
        scores = scores.masked_fill(~kept(values, scaled, position, parameters), -math.inf)
    return torch.where(greedy[:, None], values, scores).argmax(dim=-1)  # the first among equals


def gumbel(key: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, fp32 `[B, V]`, for keys `[B, 2]` and positions int64 `[B]`.

    The position of the largest sum of log-probability and noise is a draw from the distribution (Gumbel 1954; Maddison,
    Tarlow and Minka 2014). Computed in float64, so that its fp32 value is the same on every kind of device.
    """
    return (-torch.log(-torch.log(uniform_rows(key, position, vocab_size)))).float()


def kept(values: Tensor, scaled: Tensor, position: Tensor, parameters: Parameters) -> Tensor:
    """Return which ids top-k, then top-p, and min-p keep, bool `[B, V]`. scaled: values / temperature."""
    ordered, ids = values.sort(dim=-1, descending=True, stable=True)
    stays = top_k_stays(ordered, parameters.integers.top_k)
    probabilities = torch.softmax(scaled.gather(1, ids).masked_fill(~stays, -math.inf), dim=-1)
    stays = stays & top_p_stays(probabilities, top_p_now(position, parameters))
    return torch.zeros_like(stays).scatter_(1, ids, stays) & min_p_stays(scaled, parameters.floats.min_p)


def min_p_stays(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Return where a probability is at least min_p times the largest. scaled: fp32 `[B, V]`; min_p: float64 `[B]`."""
    distance = scaled - scaled.amax(dim=1, keepdim=True)
    return (distance >= min_p.log().float()[:, None]) | (min_p[:, None] <= 0)


def top_k_stays(ordered: Tensor, top_k: Tensor) -> Tensor:
    """Return where values `[B, V]` in descending order are at least the k-th largest. top_k: int64 `[B]`; 0: all."""
    size = ordered.shape[1]
    k = torch.where(top_k == 0, size, top_k).clamp_max(size)
    return ordered >= ordered.gather(1, k[:, None] - 1)


def top_p_now(position: Tensor, parameters: Parameters) -> Tensor:
    """Return the top_p of the next token, fp32 `[B]`; 1 where it keeps all.

    With a decay the t-th new token, from 0, has max(top_p x decay^t, bound) (Lee et al. 2022, in Megatron-LM's form).
    """
    p, decay, bound = parameters.floats.top_p, parameters.floats.top_p_decay, parameters.floats.top_p_bound
    new = (position + 1 - parameters.integers.prompt_length).clamp_min(0)
    now = torch.where(decay > 0, torch.maximum(p * decay**new, bound), p)
    return torch.where(p > 0, now, 1.0).float()


def top_p_stays(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return where the sum of all probabilities before one, in descending order, is at most top_p (Megatron-LM's rule).

    probabilities: fp32 `[B, V]`; top_p: fp32 `[B]`; 1: all stay. That which crosses top_p stays; at equality one more.
    """
    whole = (probabilities.double() * UNIT).long()
    before = ((whole.cumsum(dim=-1) - whole).double() / UNIT).float()
    return (before <= top_p[:, None]) | (top_p[:, None] >= 1)


SAMPLE = Operation("sample", sample_reference, "argmax of logits / temperature + Gumbel noise, of the ids that stay")


def sample(
    logits: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant, columns: int | None = None
) -> Sampled:
    """Choose a token for each row of logits `[B, V]`, any float dtype, V >= columns >= vocab_size; ids stay below
    vocab_size. Log-probabilities are those of the softmax over the first `columns`, the tokens of the model; None: over
    vocab_size. They are NaN for a row where one of these logits is NaN or plus infinity.

    slots: int64 `[B]`, the row of `sequences` that each row of logits belongs to. Nothing is synchronised with the
    host, and all shapes follow from those of the arguments: a CUDA graph can capture the call.
    """
    return SAMPLE(logits, sequences, slots, vocab_size, variant, columns)


def record_reference(tokens: Tensor, slots: Tensor, sequences: Sequences) -> None:
    """Append tokens int64 `[B]` to the sequences in slots int64 `[B]`, in place. At the last position the position
    stays, and a further token overwrites the last."""
    position = (sequences.position[slots] + 1).clamp_max(sequences.history.shape[1] - 1)
    sequences.token[slots], sequences.position[slots] = tokens, position
    sequences.history[slots, position] = tokens


RECORD = Operation("record", record_reference, "history[slots, position + 1] = tokens")


def record(sequences: Sequences, slots: Tensor, tokens: Tensor) -> None:
    """Append the tokens int64 `[B]` of a step to the sequences in slots int64 `[B]`, in place."""
    RECORD(tokens, slots, sequences)
