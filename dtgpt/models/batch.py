"""The inputs of a forward pass: tokens, and what is known of each of them.

One tuple holds all of it, so that micro-batches, pipeline stages and CUDA graphs cut, send and copy the same fields,
whatever a run learns. Documents that meet in a window may be kept apart in positions, attention and loss; the three
options have the names and the meaning of Megatron-LM's (megatron/core/datasets/gpt_dataset.py).

A document's last token is its end of text. That token still belongs to its document; what follows begins a new one. A
window that starts inside a document counts from its own start."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Tokens and what belongs to them; a field that is None changes nothing.

    The order is that of the arguments of `Decoder.forward`.
    """

    tokens: Tensor  # int64 [B, T]
    dropout_keys: Tensor | None = None  # int64 [B, num_sites, 2]; None: no dropout
    targets: Tensor | None = None  # int64 [B, T]: the token after each; None: logits instead of a loss
    positions: Tensor | None = None  # int64 [B, T]; None: 0, 1, ...
    document_bounds: Tensor | None = None  # int32 [B, T, 2]: first position and end of what each token may attend to
    loss_weights: Tensor | None = None  # fp32 [B, T]: factors of tokens' losses; beside by_token [B, N], of addends
    by_token: Tensor | None = None  # [B, T, ...]: what a loss of its own knows of tokens, such as what they belong to
    by_sample: Tensor | None = None  # [B, ...]: what a loss of its own knows of samples
    copies: Tensor | None = None  # int64 [B, G, T]: of rows of S tokens that G samples share, the place of each token

    @property
    def beside_tokens(self) -> dict[str, Tensor]:
        """The other fields that are there, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None and name != "tokens"}

    def chunk(self, pieces: int) -> "list[Batch]":
        """Return the batch cut into `pieces` equal micro-batches."""
        columns = [[None] * pieces if value is None else value.chunk(pieces) for value in self]
        return [Batch(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True)
class DocumentMasks:
    """`reset_position_ids`: positions begin at 0 in every document. `reset_attention_mask`: tokens attend to their own
    document only. `eod_mask_loss`: the token after an end of text need not be predicted."""

    end_of_text: int | None
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    def batch(self, windows: Tensor, dropout_keys: Tensor | None = None) -> Batch:
        """Return the batch of windows int64 `[B, T + 1]`."""
        # Contiguous, as copies of inputs in a graph are: another layout would be compiled again during capture.
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return self.apply(Batch(tokens, dropout_keys=dropout_keys, targets=targets))

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
