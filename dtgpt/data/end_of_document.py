"""What ends with a document: positions, attention and loss, each as Megatron-LM's option of that name has it
(megatron/core/datasets/gpt_dataset.py).

A document's last token is its end of text. That token still belongs to its document; what follows begins a new one. A
window that starts inside a document counts from its own start.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Marks(NamedTuple):
    """Of tokens `[B, T]`, each None where nothing differs from plain text: `positions` int64 `[B, T]`; `documents`
    int64 `[B, T]`, where a token sees those before it with its own number; `weights` fp32 `[B, T]` of the losses."""

    positions: Tensor | None = None
    documents: Tensor | None = None
    weights: Tensor | None = None


class EndOfDocument:
    """`reset_position_ids`: positions begin at 0 in every document. `reset_attention_mask`: tokens see no other
    document than theirs. `eod_mask_loss`: what follows an end of text need not be predicted."""

    def __init__(self, end_of_text: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool):
        self.end_of_text, self.reset_position_ids = end_of_text, reset_position_ids
        self.reset_attention_mask, self.eod_mask_loss = reset_attention_mask, eod_mask_loss
        self.wanted = reset_position_ids or reset_attention_mask or eod_mask_loss

    def marks(self, tokens: Tensor) -> Marks:
        """Of int64 `[B, T]`, on any device. Weights are 0 or 1 here."""
        if not self.wanted:
            return Marks()
        ends = tokens == self.end_of_text
        return Marks(
            positions=reset_positions(ends) if self.reset_position_ids else None,
            documents=number_documents(ends) if self.reset_attention_mask else None,
            weights=(~ends).float() if self.eod_mask_loss else None,
        )


def number_documents(ends: Tensor) -> Tensor:
    """How many ends of text stand before each token: int64 `[B, T]` from bool `[B, T]`."""
    return ends.cumsum(-1) - ends.long()


def reset_positions(ends: Tensor) -> Tensor:
    """The distance of each token from the start of its document, or of the window: int64 `[B, T]` from bool."""
    positions = torch.arange(ends.shape[-1], device=ends.device).expand(ends.shape)
    starts = torch.where(ends, positions + 1, 0)  # of the documents after these tokens
    starts = torch.cat([torch.zeros_like(starts[..., :1]), starts[..., :-1]], -1)
    return positions - starts.cummax(-1).values
