"""Rotary positions of queries and keys that are normalised over all heads together (OLMo 2, Team OLMo 2025): from a
packed QKV projection to q, k and v in one operation, so that a kernel reads and writes each head once.

Sharding rule: samples and positions may be sharded, heads may not; a shard's gradients of the weights are partial sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.norms import norm
from dtgpt.ops.operation import Operation
from dtgpt.ops.rotary_positions import ROTARY_QKV, split_heads


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `[B, T, G, R + 2, D]` of q `[B, T, N D]`, k `[B, T, G D]` and v `[B, T, G, D]`."""
    size = v.shape[-1]
    queries = q.unflatten(-1, (v.shape[2], -1, size))
    return torch.cat([queries, k.unflatten(-1, (-1, 1, size)), v.unsqueeze(3)], dim=3)


def bounded(limit: float, *parts: Tensor) -> tuple[Tensor, ...]:
    """Return parts clamped between -limit and limit; 0: as they are."""
    return tuple(part.clamp(-limit, limit) for part in parts) if limit else parts


def _from_heads(
    qkv: Tensor,
    positions: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    limit: float,
    rotation: Sequence[float],
    num_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(qkv)
    q, k = norm(q.flatten(-2), q_weight, None, eps), norm(k.flatten(-2), k_weight, None, eps)
    return ROTARY_QKV(packed(*bounded(limit, q, k, v)), positions, None, None, 0.0, rotation, num_positions)


# qkv, positions, q_weight, k_weight, eps, limit, rotation, num_positions: q `[B, T, N, D]`, k and v `[B, T, G, D]` of
# qkv `[B, T, G, R + 2, D]`, q and k by RMSNorms `[N D]` and `[G D]`, all bounded by the limit, q and k rotated.
JOINT_ROTARY = Operation("joint_rotary", _from_heads, "q, k of normalised heads, v")
