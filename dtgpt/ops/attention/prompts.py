"""Writing several prompts to a cache at once, padded to one length: each has a slot, whose first positions it fills.

Sharding rule: heads may be sharded.
"""

import torch
from torch import Tensor

from dtgpt.ops.operation import Operation


def write_prompts_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write k and v `[B, T, N_kv, D]` at the positions 0..T - 1 of keys and values `[slots, N_kv, P, D]`. slots: int64
    `[B]`; of rows that share a slot one remains."""
    for kept, new in ((keys, k), (values, v)):
        kept[:, :, : new.shape[1]].index_copy_(0, slots, new.transpose(1, 2))


write_prompts = Operation("write_prompts", write_prompts_reference, "keys[slots, :, :T], values[slots, :, :T] = k, v")


def write_rings(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor) -> None:
    """Write the last positions, as many as there are places, of the first `lengths` tokens of k and v `[B, T, N_kv, D]`
    to the rings keys and values `[slots, N_kv, P, D]`. slots, lengths: int64 `[B]`; of rows that share a slot one
    remains."""
    places, rows = keys.shape[2], torch.arange(len(k), device=k.device)
    place, newest = torch.arange(min(places, k.shape[1]), device=k.device), lengths[:, None] - 1
    # The newest position that belongs to each place; where there is none, what is written is never read.
    position = (newest - (newest - place) % places).clamp(min=0)
    for kept, new in ((keys, k), (values, v)):
        kept[:, :, : len(place)].index_copy_(0, slots, new[rows[:, None], position].transpose(1, 2))
