"""What ends with a document: positions, attention and loss, each as Megatron-LM's option of that name has it
(megatron/core/datasets/gpt_dataset.py).

A document's last token is its end-of-document token (EOD). That token still belongs to its document; what follows
begins a new one. A window that starts inside a document counts from its own start.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dtgpt.data.samples import PADDING


@dataclass(frozen=True)
class Options:
    """`reset_position_ids`: positions begin at 0 in every document. `reset_attention_mask`: tokens see no other
    document than theirs. `eod_mask_loss`: what follows an EOD need not be predicted."""

    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


@dataclass(frozen=True)
class Batch:
    """`tokens` and `labels` int64 [B, T]. None where nothing differs from plain text: `position_ids` int64 [B, T];
    `document_ids` int64 [B, T], where a token sees those before it with its own id; `loss_mask` fp32 [B, T], 0 where
    the label does not count."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor | None
    document_ids: Tensor | None
    loss_mask: Tensor | None


def mark(windows: Tensor, eod: int, options: Options, padded: bool = False) -> Batch:
    """A batch from windows int64 [B, T + 1], on any device. `padded`: there may be PADDING (of `drop_last=False`), a
    token 0 that has no loss."""
    tokens, labels = windows[:, :-1], windows[:, 1:]
    is_eod, loss_mask = tokens == eod, None
    if options.eod_mask_loss or padded:
        loss_mask = (~((is_eod & options.eod_mask_loss) | (labels == PADDING))).float()
    return Batch(
        tokens=tokens.clamp(min=0) if padded else tokens,
        labels=labels.clamp(min=0) if padded else labels,
        position_ids=reset_positions(is_eod) if options.reset_position_ids else None,
        document_ids=number_documents(is_eod) if options.reset_attention_mask else None,
        loss_mask=loss_mask,
    )


def number_documents(is_eod: Tensor) -> Tensor:
    """How many EODs stand before each token: int64 [B, T] from bool [B, T]."""
    return is_eod.cumsum(-1) - is_eod.long()


def reset_positions(is_eod: Tensor) -> Tensor:
    """The distance of each token from the start of its document, or of the window: int64 [B, T] from bool [B, T]."""
    positions = torch.arange(is_eod.shape[-1], device=is_eod.device).expand(is_eod.shape)
    starts = torch.where(is_eod, positions + 1, 0)  # of the documents after these tokens
    starts = torch.cat([torch.zeros_like(starts[..., :1]), starts[..., :-1]], -1)
    return positions - starts.cummax(-1).values
