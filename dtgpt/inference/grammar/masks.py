"""The ids that may come next, as a rule of sampling."""

import math

import torch
from torch import Tensor

from dtgpt.ops.sampling.sequences import Sequences, Variant


def mask(
    measured: Tensor, edited: Tensor, sequences: Sequences, slots: Tensor, variant: Variant
) -> tuple[Tensor, Tensor]:
    """Return values `[B, V]` as they are, of which log-probabilities are measured, and of which a token is chosen: with
    -inf at the ids that the host does not allow after each sequence."""
    bits = torch.arange(32, dtype=torch.int32, device=edited.device)
    allowed = (sequences.allowed[slots][:, :, None] >> bits & 1).flatten(1)  # [B, 32 W]
    columns = min(edited.shape[1], allowed.shape[1])  # what is behind, no row may choose
    return measured, edited[:, :columns].masked_fill(allowed[:, :columns] == 0, -math.inf)
