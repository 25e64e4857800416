"""Log-probabilities of given tokens, without logits of full size in fp32."""

from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.sampling.sample import log_probabilities

PIECE = 1 << 22  # logits that are widened to fp32 at a time: 16 MiB


class Scores(NamedTuple):
    """Scores of M targets."""

    logprobs: Tensor  # fp32 [M]
    greedy: Tensor  # bool [M], whether the target is the likeliest token, the smallest id among equals
    top_ids: Tensor  # int64 [M, alternatives]
    top_logprobs: Tensor  # fp32 [M, alternatives]


def token_scores(logits: Tensor, targets: Tensor, vocab_size: int, alternatives: int = 0) -> Scores:
    """Return the log-probability of each target under its row of logits `[M, V]`, V >= vocab_size, and the likeliest
    tokens. targets: int64 `[M]`."""
    rows = max(1, PIECE // logits.shape[1])
    pieces = [
        _scores(logits[first : first + rows, :vocab_size], targets[first : first + rows], alternatives)
        for first in range(0, max(len(logits), 1), rows)
    ]
    return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _scores(logits: Tensor, targets: Tensor, alternatives: int) -> Scores:
    values = logits.float()
    logprobs, top_ids, top_logprobs = log_probabilities(values, targets, alternatives)
    return Scores(logprobs, values.argmax(dim=-1) == targets, top_ids, top_logprobs)
