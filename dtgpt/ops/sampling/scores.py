"""Log-probabilities of given tokens, without logits of full size in fp32."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.ops.loss.cross_entropy import losses_of, over_group, real_columns, row_losses, row_terms
from dtgpt.ops.sampling.reference import log_probabilities

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


def as_in_training(
    logits: Tensor, ids: Tensor, top_ids: Tensor, vocab_size: int, start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the log-probabilities "logprobs" of ids `[M]` and "top_logprobs" of top_ids `[M, alternatives]` under
    logits `[M, V]`, V >= vocab_size, with the bits of the loss in training. group: the ranks that have the other
    columns, where logits `[M, V_local]` are those from `start` on."""
    logits, chosen = logits.contiguous(), [column.contiguous() for column in (ids, *top_ids.unbind(1))]
    real = real_columns(logits.shape[1], vocab_size, start)
    if group is None:
        first, *others = (-row_losses(logits, column, real) for column in chosen)
    else:
        terms = torch.cat([row_terms(logits, column, start, real) for column in chosen], dim=1)
        first, *others = (-losses_of(*over_group(terms, group))).chunk(len(chosen))
    return {"logprobs": first, "top_logprobs": torch.stack(others, 1) if others else top_ids.float()}


def _scores(logits: Tensor, targets: Tensor, alternatives: int) -> Scores:
    values = logits.float()
    logprobs, top_ids, top_logprobs = log_probabilities(values, targets, alternatives)
    return Scores(logprobs, values.argmax(dim=-1) == targets, top_ids, top_logprobs)
