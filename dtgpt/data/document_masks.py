"""Positions, attention and loss by document, each as Megatron-LM's option of that name has it
(megatron/core/datasets/gpt_dataset.py).

A document's last token is its end of text. That token still belongs to its document; what follows begins a new one. A
window that starts inside a document counts from its own start.
"""

import torch
from torch import Tensor

from dtgpt.models.batch import Batch


class DocumentMasks:
    """`reset_position_ids`: positions begin at 0 in every document. `reset_attention_mask`: tokens attend to their own
    document only. `eod_mask_loss`: the token after an end of text need not be predicted."""

    def __init__(
        self, end_of_text: int | None, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
    ):
        self.end_of_text, self.reset_position_ids = end_of_text, reset_position_ids
        self.reset_attention_mask, self.eod_mask_loss = reset_attention_mask, eod_mask_loss
        self.wanted = reset_position_ids or reset_attention_mask or eod_mask_loss

    def batch(self, windows: Tensor, dropout_keys: Tensor | None = None) -> Batch:
        """Return the batch of windows int64 `[B, T + 1]`."""
        # Contiguous, as copies of inputs in a graph are: another layout would be compiled again during capture.
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return self.apply(Batch(tokens, dropout_keys=dropout_keys, targets=targets))

    def apply(self, batch: Batch) -> Batch:
        """Return the batch, on any device, with positions, document bounds and loss weights (0 or 1) as wanted."""
        if not self.wanted:
            return batch
        ends = torch.eq(batch.tokens, -1 if self.end_of_text is None else self.end_of_text)
        return batch._replace(
            positions=reset_positions(ends) if self.reset_position_ids else None,
            document_bounds=document_bounds(ends) if self.reset_attention_mask else None,
            loss_weights=(~ends).float() if self.eod_mask_loss else None,
        )


def reset_positions(ends: Tensor) -> Tensor:
    """Return the distance of each token from the start of its document, or of the window: int64 `[B, T]` from bool."""
    return torch.arange(ends.shape[-1], device=ends.device) - _starts(ends)


def document_bounds(ends: Tensor) -> Tensor:
    """Return where the document of each token begins and ends in the window: int32 `[B, T, 2]` from bool `[B, T]`."""
    length = ends.shape[-1]
    stops = torch.where(ends, torch.arange(1, length + 1, device=ends.device), length)
    return torch.stack([_starts(ends), stops.flip(-1).cummin(-1).values.flip(-1)], -1).int()


def _starts(ends: Tensor) -> Tensor:
    """Return the start of each token's document, int64 `[B, T]`."""
    after_end = torch.where(ends, torch.arange(1, ends.shape[-1] + 1, device=ends.device), 0)
    return torch.cat([torch.zeros_like(after_end[..., :1]), after_end[..., :-1]], -1).cummax(-1).values
