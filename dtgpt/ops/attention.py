"""Causal scaled dot-product attention (Vaswani et al. 2017) with dropout on the probabilities by global index.

Without dropout PyTorch's fused kernels serve. With dropout they cannot, since they draw masks from a generator's
state; then the probabilities are formed explicitly, with the softmax in fp32, and dropped with the functional mask.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.dropout import Dropout


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout, key: Tensor | None = None) -> Tensor:
    """q, k, v: `[B, N, T, D]` -> `[B, N, T, D]`.

    key: `[B, 2]` or None. The mask's index within a sample is (head, query, column); a shard of the heads says in
    `dropout.start` which head is its first.
    """
    if key is None or dropout.p == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-2, -1)).float() * (1 / math.sqrt(q.shape[-1]))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(v.dtype)
    return dropout(probabilities, key) @ v
