"""Next-token cross-entropy over the true vocabulary; the columns that only pad the table stay outside the softmax."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean loss in nats, fp32 scalar. logits: `[B, T, V]`, V >= vocab_size; targets: int64 `[B, T]`."""
    return F.cross_entropy(logits[..., :vocab_size].flatten(0, -2).float(), targets.flatten())
