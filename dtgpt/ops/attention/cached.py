"""Attention of new tokens over keys and values that a cache keeps by slot: one sequence each, position by position.

It is an operation of its own, and no call of `core.py`: each row has another length, and a kernel reads keys and values
where they lie. The attention of a batch would want them gathered, which copies the cache in each step; the definition
here does so.

A slot holds P positions. Memory behind a sequence's last position is not initialised, or is that of an earlier sequence
of the slot: it may hold NaN, which never reaches a result. With a window W, a slot of a longer sequence has W positions
and is a ring: position p is at p % W, where it replaces the one that has left the window. Which order they have in
memory does not matter, since positions are in the keys.

Sharding rule: heads may be sharded; a shard holds all heads of q that share its heads of k and v.
"""

import math

import torch
from torch import Tensor

from dtgpt.ops.attention.core import PLAIN_RULE, AttentionRule, Backend, causal_attention, softmax_by_rule
from dtgpt.ops.operation import Operation


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:
    """Write k and v `[B, N_kv, D]` at (slot, position) of keys and values `[slots, N_kv, P, D]`, and return the
    attention `[B, N, D]` of q `[B, N, D]`: row i attends to its slot's positions 0..positions[i], or to those of the
    rule's window, which is at least P.

    slots, positions: int64 `[B]`. Rows that share a slot (a scratch slot alone may) have undefined results. The shapes
    on CUDA do not depend on the positions, so that nothing waits for the device.
    """
    places = positions
    if rule.window is not None:  # once a ring is full, all of it is in the window
        places, positions = positions % keys.shape[2], positions.clamp(max=keys.shape[2] - 1)
    keys[slots, :, places], values[slots, :, places] = k, v
    return ATTEND_ROWS(q, keys, values, slots, positions, rule)


def attend_rows_reference(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rule: AttentionRule = PLAIN_RULE
) -> Tensor:
    """Return the attention `[B, N, D]` of q where k and v are in the cache, in plain torch: the oracle."""
    length = keys.shape[2] if q.is_cuda else int(positions.max()) + 1
    behind = torch.arange(length, device=q.device) > positions[:, None]
    # Hidden values are set to zero as well, since their probability of zero times NaN would be NaN.
    seen_keys, seen_values = keys[slots, :, :length], values[slots, :, :length].masked_fill(behind[:, None, :, None], 0)
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [B, N_kv, N / N_kv, D]
    products = (grouped @ seen_keys.transpose(-2, -1)).float()
    scores = products / math.sqrt(q.shape[-1]) if rule.scale is None else products * rule.scale
    probabilities = softmax_by_rule(scores.flatten(1, 2)[:, :, None], behind[:, None, None], rule)
    return (probabilities.reshape(scores.shape).to(q.dtype) @ seen_values).flatten(1, 2)


ATTEND_ROWS = Operation("attend_rows", attend_rows_reference, "attention of one query to its slot of a cache")


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot: int,
    first: int,
    backend: Backend = "auto",
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:
    """Write k and v `[1, T, N_kv, D]` at the positions from `first` on of one slot of keys and values
    `[slots, N_kv, P, D]`, and return the causal attention `[1, T, N, D]` of q `[1, T, N, D]` over the positions
    0..first + T - 1, read in place where the slot has all of them."""
    last = first + q.shape[1]
    if last > keys.shape[2]:
        return _attend_ring_chunk(q, k, v, keys[slot], values[slot], first, backend, rule)
    keys[slot, :, first:last], values[slot, :, first:last] = k[0].transpose(0, 1), v[0].transpose(0, 1)
    seen_keys, seen_values = (kept[slot, :, :last].transpose(0, 1)[None] for kept in (keys, values))
    return causal_attention(q, seen_keys, seen_values, backend=backend, rule=rule)


def _attend_ring_chunk(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, first: int, backend: Backend, rule: AttentionRule
) -> Tensor:
    """Return the attention of `attend_chunk` over a slot `[N_kv, P, D]` that is a ring."""
    places, last = keys.shape[1], first + q.shape[1]
    if rule.window is None or rule.window > places:
        raise ValueError(f"{last} positions do not fit into a slot of {places} with a window of {rule.window}")
    earlier = torch.arange(max(0, first - rule.window + 1), first, device=q.device) % places
    newest = torch.arange(max(first, last - places), last, device=q.device) % places
    seen = []
    for kept, new in ((keys, k), (values, v)):
        seen.append(torch.cat([kept[:, earlier].transpose(0, 1)[None], new], dim=1))
        kept[:, newest] = new[0, -len(newest) :].transpose(0, 1)
    seen_keys, seen_values = seen
    return causal_attention(q, seen_keys, seen_values, backend=backend, rule=rule)
