"""Attention of new tokens over keys and values that a cache keeps by slot: one sequence each, position by position.

A slot holds P positions. Memory behind a sequence's last position is not initialised, or is that of an earlier sequence
of the slot: it may hold NaN, which never reaches a result. With a window W, a slot of a longer sequence has W positions
and is a ring: position p is at p % W, where it replaces the one that has left the window. Which order they have in
memory does not matter, since positions are in the keys.

Reference: `attend_rows_reference`. Fast path of one token a sequence: Triton kernels (`cached_kernels`), for heads of
16, 32, 64, 128 or 256, and scores that are not bounded softly.
Sharding rule: heads may be sharded; a shard holds all heads of q that share its heads of k and v.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.attention.core import PLAIN_RULE, AttentionRule, Backend, causal_attention, softmax_by_rule
from dtgpt.ops.decode.weights import Rotary
from dtgpt.ops.kernels.attention.flash_launch import exact_launch
from dtgpt.ops.kernels.devices import has_hopper, has_triton, shared_memory

SPLIT = 128  # positions that a kernel takes at once, as in `cached_kernels`
SHORT = 8  # splits of a slot, up to which a program takes splits that follow each other
HEAD_SIZES = (16, 32, 64, 128)  # D that the kernels of whole blocks take
ROW_SIZES = (*HEAD_SIZES, 256)  # D that those of attention take


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor,
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:  # fmt: skip
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
    known = q.shape[-1] in ROW_SIZES and rule.softcap is None
    if has_triton(q) and known and stage_bytes(keys) <= shared_memory(q.device):
        return decode_attention(q.unflatten(1, (k.shape[1], -1)), keys, values, slots, positions, rule=rule)
    return attend_rows_reference(q, keys, values, slots, positions, rule)


def attend_rows_reference(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rule: AttentionRule = PLAIN_RULE
) -> Tensor:
    """Return what `attend_rows` does with k and v that are in the cache already, in plain torch: the test oracle."""
    length = keys.shape[2] if q.is_cuda else int(positions.max()) + 1
    behind = torch.arange(length, device=q.device) > positions[:, None]
    # Hidden values are set to zero as well, since their probability of zero times NaN would be NaN.
    seen_keys, seen_values = keys[slots, :, :length], values[slots, :, :length].masked_fill(behind[:, None, :, None], 0)
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [B, N_kv, N / N_kv, D]
    products = (grouped @ seen_keys.transpose(-2, -1)).float()
    scores = products / math.sqrt(q.shape[-1]) if rule.scale is None else products * rule.scale
    probabilities = softmax_by_rule(scores.flatten(1, 2)[:, :, None], behind[:, None, None], rule)
    return (probabilities.reshape(scores.shape).to(q.dtype) @ seen_values).flatten(1, 2)


def write_prompts(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write k and v `[B, T, N_kv, D]` at the positions 0..T - 1 of keys and values `[slots, N_kv, P, D]`. slots: int64
    `[B]`; of rows that share a slot one remains."""
    if not has_triton(k):
        for kept, new in ((keys, k), (values, v)):
            kept[:, :, : new.shape[1]].index_copy_(0, slots, new.transpose(1, 2))
        return
    from dtgpt.ops.kernels.attention import cached_kernels as kernels  # imported on first use, since it needs Triton

    size, (batch, length, heads, _) = k.shape[-1], k.shape
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    kernels.write_kernel[(math.ceil(length / 64), heads, batch)](
        k, v, keys, values, slots, *k.stride()[:3], length,
        KV_HEADS=heads, SIZE=size, BLOCK=1 << (size - 1).bit_length(), LENGTH=keys.shape[2], ROWS=64, num_warps=4,
    )  # fmt: skip


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


def stage_bytes(keys: Tensor) -> int:
    """Return the bytes of keys and values of one split, as kernels hold them in shared memory."""
    return 2 * SPLIT * keys.shape[-1] * keys.itemsize


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rotary: Rotary | None = None,
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:  # fmt: skip
    """Launch the kernels: return the attention `[B, N, D]` of q `[B, N_kv, N / N_kv, D]`, whose last dimension is
    dense, over what `attend_rows` describes, k and v of the new tokens being in the cache.

    rotary: normalise and rotate q first, and write k, likewise, and v of the new tokens, which lie behind the q of
    their group as in a packed projection `[B, N_kv, N / N_kv + 2, D]`. rule: its scale and its sinks count here.
    """
    from dtgpt.ops.kernels.attention import cached_kernels as kernels  # imported on first use, since it needs Triton

    rows, kv_heads, group, size = q.shape
    length, heads = keys.shape[2], kv_heads * group
    splits = math.ceil(length / SPLIT)
    partial = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
    state = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    room = q.dtype != torch.float32 and 2 * stage_bytes(keys) <= shared_memory(q.device)  # for two splits at once
    spread = spread_splits(splits, rows, room)
    pdl, queries = has_hopper(q.device), 1 << (group - 1).bit_length()
    table = None if rotary is None else rotary.table
    if rotary is not None and rotary.normalises():  # in fp64, which all programs of a head would repeat
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels.rotate_kernel[(kv_heads, rows)](
            q, turned, keys, values, slots, positions, *rotary, *q.stride()[:2], rotary.table.shape[1],
            KV_HEADS=kv_heads, GROUP=group, QUERIES=queries, SIZE=size, LENGTH=length, PDL=pdl, num_warps=1,
            launch_pdl=pdl,
        )  # fmt: skip
        q, table = turned, None
    kernels.split_kernel[(spread.programs, kv_heads, rows)](
        q, keys, values, slots, positions, partial, state, math.log2(math.e) * rule.factor(size), table,
        *q.stride()[:2], 0 if table is None else table.shape[1],
        KV_HEADS=kv_heads, GROUP=group, QUERIES=max(16, queries), SIZE=size, LENGTH=length,
        SPLITS=splits, EACH=spread.each, STEP=spread.step, STAGES=2 if room and spread.each * spread.step > 1 else 1,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    kernels.merge_kernel[(heads, rows)](
        partial, state, positions, out, rule.sinks,
        HEADS=heads, SIZE=size, SPLITS=splits, BLOCK=1 << (splits - 1).bit_length(), PDL=pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Write k and v `[B, N_kv, D]` as `attend_rows` does, and return the attention `[B, N, D]` of q
    `[B, N_kv, N / N_kv, D]`, with the bits that `flash_attention` gives the last query of each sequence."""
    from dtgpt.ops.kernels.attention.exact_kernels import exact_kernel  # imported on first use, since it needs Triton

    (rows, kv_heads, group, size), length = q.shape, keys.shape[2]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.empty(rows, kv_heads * group, size, dtype=q.dtype, device=q.device)
    how = exact_launch(q.dtype, kv_heads * group, kv_heads, size, rows, q.device)
    exact_kernel[(kv_heads, rows)](
        q, k, v, keys, values, slots, positions, out, *q.stride()[:2], *k.stride()[:2],
        math.log2(math.e) / math.sqrt(size), KV_HEADS=kv_heads, GROUP=group, SIZE=size, LENGTH=length,
        BLOCK_M=max(how.BLOCK_M, 1 << (group - 1).bit_length()), BLOCK_N=how.BLOCK_N,
        WIDTH=max(16, 1 << (size - 1).bit_length()), num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    return out


class Spread(NamedTuple):
    """The splits of a program: `each` that follow each other, or, where `step` is not 1, every step-th of all."""

    programs: int
    each: int = 1
    step: int = 1


def spread_splits(splits: int, rows: int, room: bool) -> Spread:
    """Return how the splits of each slot are spread over programs, as measured on an H200. Where sequences are much
    shorter than their slots, most splits are empty, and a program that finds nothing takes time, too. Few programs take
    long over one sequence that fills its slot. With p programs a slot, the first time grows with rows * p, the second
    with splits / p: their sum is smallest where p is in proportion to the root of splits / rows.

    room: whether a program has memory for two splits, so that it loads one while it computes another.
    """
    if rows < 16 or not room:
        most = max(16, min(128, 1024 // rows))
    elif splits <= SHORT:
        each = 2 if rows < 256 else 4
        return Spread(math.ceil(splits / each), each)
    else:
        most = max(2, round(8.5 * math.sqrt(splits / rows)))
    return Spread(splits) if splits <= most else Spread(most, step=most)


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: int, first: int, backend: Backend = "auto",
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:  # fmt: skip
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
    """Return what `attend_chunk` does for a slot `[N_kv, P, D]` that is a ring."""
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
