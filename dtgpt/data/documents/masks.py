"""Positions, attention and loss of documents that meet in a window. The three options have the names and the meaning of
Megatron-LM's (megatron/core/datasets/gpt_dataset.py).

A document's last token is its end of text. That token still belongs to its document; what follows begins a new one. A
window that starts inside a document counts from its own start.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtgpt.models.batch import Batch, WindowMasks

if TYPE_CHECKING:
    from dtgpt.data.documents import DataFields


@dataclass(frozen=True)
class DocumentMasks(WindowMasks):
    """`reset_position_ids`: positions begin at 0 in every document. `reset_attention_mask`: tokens attend to their own
    document only. `eod_mask_loss`: the token after an end of text need not be predicted."""

    end_of_text: int | None
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    def apply(self, batch: Batch) -> Batch:
        """Return the batch, on any device, with positions, document bounds and loss weights (0 or 1) as wanted."""
        if not (self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss):
            return batch
        ends = torch.eq(batch.tokens, -1 if self.end_of_text is None else self.end_of_text)
        return batch._replace(
            positions=reset_positions(ends) if self.reset_position_ids else None,
            document_bounds=document_bounds(ends) if self.reset_attention_mask else None,
            loss_weights=(~ends).float() if self.eod_mask_loss else None,
        )


def masks_of(data: "DataFields", end_of_text: int | None) -> DocumentMasks:
    """Return what the options of the data ask for."""
    return DocumentMasks(end_of_text, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


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
