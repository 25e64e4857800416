"""Sliding windows of attention as bounds of documents that move with the query (Beltagy et al. 2020, section 3.1).

Query i sees the columns i - W + 1 to i, W tokens with its own, as `sliding_window` of Hugging Face's models has it.
"""

import torch
from torch import Tensor


def spans_of_window(window: int, batch: int, columns: int, device: torch.device, spans: Tensor | None = None) -> Tensor:
    """Return int32 `[B, S, 2]` for S `columns`: the first column that the query at each position sees, and the end of
    the queries that see the column there. spans: those of documents, to which both are restricted."""
    position = torch.arange(columns, dtype=torch.int32, device=device)
    first, end = (position - (window - 1)).clamp(min=0), (position + window).clamp(max=columns)
    if spans is not None:
        first, end = torch.maximum(first, spans[..., 0]), torch.minimum(end, spans[..., 1])
    return torch.stack([first, end], dim=-1).expand(batch, -1, -1)
