"""Log-probabilities with the bits of the loss in training."""

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.ops.loss.cross_entropy import losses_of, over_group, real_columns, row_losses, row_terms


def as_in_training(
    logits: Tensor,
    ids: Tensor,
    top_ids: Tensor,
    vocab_size: int,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
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
