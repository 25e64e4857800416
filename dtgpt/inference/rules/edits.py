"""Rules that change logits before a token is chosen. Each takes values fp32 `[B, V]` and returns new ones.

A row that a rule does not concern comes out as it was. Ids that are not in use address a column behind the last.
"""

import math

import torch
from torch import Tensor

from dtgpt.ops.sampling.sequences import NONE, Parameters, Sequences, Variant, unpack


def _marked(values: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Return whether a column of values `[B, V]` is one of the ids int64 `[B, N]`, of those `where`, bool `[B, N]`."""
    count = values.shape[1]
    marks = torch.zeros(len(values), count + 1, dtype=torch.int32, device=values.device)
    marks.scatter_add_(1, torch.where(where, ids, count), where.int())
    return marks[:, :count] > 0


def _ban(values: Tensor, ids: Tensor, banned: Tensor) -> Tensor:
    """Set the values of ids int64 `[B, N]` to -inf where banned, bool `[B, N]`."""
    return values.masked_fill(_marked(values, ids, banned), -math.inf)


def ban_newline_after_colon(values: Tensor, token: Tensor, parameters: Parameters) -> Tensor:
    """Ban the newline where the last token, int64 `[B]`, is a colon (Megatron-LM's `prevent_newline_after_colon`)."""
    colon, newline = parameters.integers.colon, parameters.integers.newline
    return _ban(values, newline[:, None], ((colon != NONE) & (token == colon))[:, None])


def penalize_repetitions(values: Tensor, history: Tensor, position: Tensor, parameters: Parameters) -> Tensor:
    """Divide the positive logits of tokens that the sequence has, prompt included, by the repetition penalty, and
    multiply the negative ones by it (Keskar et al. 2019, CTRL, section 4.1; transformers' rule for negative ones)."""
    penalty = parameters.floats.repetition_penalty.float()[:, None]
    penalty = torch.where(penalty == 0, 1.0, penalty)
    inside = torch.arange(history.shape[1], device=history.device) <= position[:, None]
    scaled = torch.where(values > 0, values / penalty, values * penalty)
    return torch.where(_marked(values, history, inside), scaled, values)


def add_bias(values: Tensor, parameters: Parameters) -> Tensor:
    """Add the logit bias."""
    bias = torch.zeros_like(values)
    return values + bias.scatter_add_(1, parameters.bias_ids, parameters.bias_values.float())


def penalize(values: Tensor, history: Tensor, position: Tensor, parameters: Parameters) -> Tensor:
    """Subtract OpenAI's penalties: frequency x (how often a token was generated) + presence, if it was at all."""
    index = torch.arange(history.shape[1], device=history.device)
    generated = (index >= parameters.integers.prompt_length[:, None]) & (index <= position[:, None])
    counts = torch.zeros_like(values).scatter_add_(1, history, generated.float())  # exact: whole numbers
    frequency, presence = parameters.floats.frequency_penalty, parameters.floats.presence_penalty
    return values - counts * frequency.float()[:, None] - (counts > 0) * presence.float()[:, None]


def ban_repeated_ngrams(values: Tensor, history: Tensor, position: Tensor, n: Tensor, longest: int) -> Tensor:
    """Ban each token that would repeat an n-gram of the sequence, prompt included (Hugging Face's
    `no_repeat_ngram_size`).

    history: int64 `[B, P]`; n: int64 `[B]`, up to `longest`; 0: no rule.
    """
    length = history.shape[1]
    back = torch.arange(1, longest, device=history.device)  # [N]
    index = torch.arange(length, device=history.device)
    last = history.gather(1, (position[:, None] + 1 - back).clamp_min(0))  # [B, N], the last token first
    # A token at `index` has the same N tokens before it as the token to come.
    before = history[:, (index[:, None] - back).clamp_min(0)]  # [B, P, N]
    same = ((before == last[:, None]) | (back >= n[:, None, None])).all(-1)
    inside = (index >= n[:, None] - 1) & (index <= position[:, None])
    return _ban(values, history, same & inside & (n > 0)[:, None])


def ban_endings(values: Tensor, token: Tensor, position: Tensor, parameters: Parameters) -> Tensor:
    """Ban what would end a sequence before it has `min_new_tokens` new tokens."""
    integers, endings = parameters.integers, parameters.endings
    early = position + 1 - integers.prompt_length < integers.min_new_tokens
    values = _ban(values, endings, early[:, None] & (endings != NONE))
    pair = integers.paired_newline
    return _ban(values, pair[:, None], (early & (pair != NONE) & (token == pair))[:, None])


def edit(
    measured: Tensor, values: Tensor, sequences: Sequences, slots: Tensor, variant: Variant
) -> tuple[Tensor, Tensor]:
    """Return what log-probabilities are measured of, and what a token is chosen of: values after the first rule, and
    after all."""
    token, position, history = (tensor[slots] for tensor in sequences[:3])
    parameters = unpack(sequences.parameters[slots])
    if variant.edits:
        values = ban_newline_after_colon(values, token, parameters)
    measured = values
    if variant.edits:
        values = penalize_repetitions(values, history, position, parameters)
        values = penalize(add_bias(values, parameters), history, position, parameters)
    if variant.ngram:
        values = ban_repeated_ngrams(values, history, position, parameters.integers.ngram, variant.ngram)
    if variant.edits:
        values = ban_endings(values, token, position, parameters)
    return measured, values
