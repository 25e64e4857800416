"""Attention of new tokens over keys and values that a cache keeps by slot: one sequence each, position by position.

A slot holds P positions. Memory behind a sequence's last position is not initialised, or is that of an earlier sequence
of the slot: it may hold NaN, which never reaches a result.

Sharding rule: heads may be sharded; a shard holds all heads of q that share its heads of k and v.
"""

import math

import torch
from torch import Tensor

from dtgpt.ops.attention.core import Backend, causal_attention


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Write k and v `[B, N_kv, D]` at (slot, position) of keys and values `[slots, N_kv, P, D]`, and return the
    attention `[B, N, D]` of q `[B, N, D]`: row i attends to its slot's positions 0..positions[i].

    slots, positions: int64 `[B]`. Rows that share a slot (a scratch slot alone may) have undefined results. The shapes
    on CUDA do not depend on the positions, so that nothing waits for the device.
    """
    keys[slots, :, positions], values[slots, :, positions] = k, v
    length = keys.shape[2] if q.is_cuda else int(positions.max()) + 1
    behind = torch.arange(length, device=q.device) > positions[:, None]
    # Hidden values are set to zero as well, since their probability of zero times NaN would be NaN.
    seen_keys, seen_values = keys[slots, :, :length], values[slots, :, :length].masked_fill(behind[:, None, :, None], 0)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, N_kv, N / N_kv, D]
    scores = (grouped @ seen_keys.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
    probabilities = scores.masked_fill(behind[:, None, None], -math.inf).softmax(dim=-1)
    return (probabilities.to(v.dtype) @ seen_values).flatten(1, 2)


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: int, first: int, backend: Backend = "auto"
) -> Tensor:
    """Write k and v `[1, T, N_kv, D]` at the positions from `first` on of one slot of keys and values
    `[slots, N_kv, P, D]`, and return the causal attention `[1, T, N, D]` of q `[1, T, N, D]` over the positions
    0..first + T - 1, read in place."""
    last = first + q.shape[1]
    keys[slot, :, first:last], values[slot, :, first:last] = k[0].transpose(0, 1), v[0].transpose(0, 1)
    seen_keys, seen_values = (kept[slot, :, :last].transpose(0, 1)[None] for kept in (keys, values))
    return causal_attention(q, seen_keys, seen_values, backend=backend)
