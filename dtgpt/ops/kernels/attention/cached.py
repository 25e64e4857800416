"""How the kernels of attention over a cache are launched: `cached_kernels`, and `exact_kernels` for training's bits."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.attention.core import PLAIN_RULE, AttentionRule
from dtgpt.ops.kernels.attention.flash_launch import LOG2_E, exact_launch
from dtgpt.ops.kernels.decode.weights import Rotary
from dtgpt.ops.kernels.devices import by_triton, has_hopper, has_triton, shared_memory

SPLIT = 128  # positions that a kernel takes at once, as in `cached_kernels`
SHORT = 8  # splits of a slot, up to which a program takes splits that follow each other
ROW_SIZES = (16, 32, 64, 128, 256)  # D that the kernels take
HEAD_SIZES = ROW_SIZES[:4]  # D that those of whole blocks take


@functools.cache
def kernels():
    from dtgpt.ops.kernels.attention import cached_kernels  # imported on first use, since it needs Triton

    return cached_kernels


def _takes_rows(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rule: AttentionRule) -> bool:
    known = q.shape[-1] in ROW_SIZES and rule.softcap is None
    return has_triton(q) and known and stage_bytes(keys) <= shared_memory(q.device)


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rule: AttentionRule
) -> Tensor:
    return decode_attention(q.unflatten(1, (keys.shape[1], -1)), keys, values, slots, positions, rule=rule)


def _write_prompts(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    size, (batch, length, heads, _) = k.shape[-1], k.shape
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    kernels().write_kernel[(math.ceil(length / 64), heads, batch)](
        k, v, keys, values, slots, *k.stride()[:3], length,
        KV_HEADS=heads, SIZE=size, BLOCK=1 << (size - 1).bit_length(), LENGTH=keys.shape[2], ROWS=64, num_warps=4,
    )  # fmt: skip


def stage_bytes(keys: Tensor) -> int:
    """Return the bytes of keys and values of one split, as kernels hold them in shared memory."""
    return 2 * SPLIT * keys.shape[-1] * keys.itemsize


class Splits(NamedTuple):
    """What the splits of attention leave for a merge."""

    partial: Tensor  # fp32 [B, N, splits, D]
    state: Tensor  # fp32 [B, N, splits, 2]
    positions: Tensor  # int64 [B]


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rotary: Rotary | None = None,
    rule: AttentionRule = PLAIN_RULE, joint: float | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernels: return the attention `[B, N, D]` of q `[B, N_kv, N / N_kv, D]`, whose last dimension is
    dense, over what `attend_rows` describes, k and v of the new tokens being in the cache. The others are arguments of
    `decode_splits`."""
    return merged(decode_splits(q, keys, values, slots, positions, rotary, rule, joint), q.dtype, rule.sinks)


def merged(kept: Splits, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """Launch the merge of splits: return the attention `[B, N, D]` in a type."""
    partial, state, positions = kept
    rows, heads, splits, size = partial.shape
    out, pdl = torch.empty(rows, heads, size, dtype=dtype, device=partial.device), has_hopper(partial.device)
    kernels().merge_kernel[(heads, rows)](
        partial, state, positions, out, sinks,
        HEADS=heads, SIZE=size, SPLITS=splits, BLOCK=1 << (splits - 1).bit_length(), PDL=pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def decode_splits(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rotary: Rotary | None = None,
    rule: AttentionRule = PLAIN_RULE, joint: float | None = None, joined: bool = False,
) -> Splits:  # fmt: skip
    """Launch the kernels of `decode_attention` but for its last, the merge.

    rotary: normalise and rotate q first, and write k, likewise, and v of the new tokens, which lie behind the q of
    their group as in a packed projection `[B, N_kv, N / N_kv + 2, D]`. rule: its scale and its sinks count here. joint:
    the norms are of all heads together, `[N D]` and `[N_kv D]`, and q, k and v are bounded by this; 0: they are not.
    joined: each program computes these norms again, which takes less time than another launch for very few rows.
    """
    rows, kv_heads, group, size = q.shape
    length, heads = keys.shape[2], kv_heads * group
    splits = math.ceil(length / SPLIT)
    partial = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
    state = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    room = q.dtype != torch.float32 and 2 * stage_bytes(keys) <= shared_memory(q.device)  # for two splits at once
    spread = spread_splits(splits, rows, room)
    pdl, queries = has_hopper(q.device), 1 << (group - 1).bit_length()
    table = None if rotary is None else rotary.table
    norms: tuple = None, None, 0.0
    if rotary is not None and joint is not None and joined:
        norms = rotary.q_norm, rotary.k_norm, rotary.eps
    elif rotary is not None and joint is not None:
        turned = _turn_jointly(q, keys, values, slots, positions, rotary, joint)
        q, table = turned, None
    elif rotary is not None and rotary.normalises():  # in fp64, which all programs of a head would repeat
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels().rotate_kernel[(kv_heads, rows)](
            q, turned, keys, values, slots, positions, *rotary, *q.stride()[:2], rotary.table.shape[1],
            KV_HEADS=kv_heads, GROUP=group, QUERIES=queries, SIZE=size, LENGTH=length, PDL=pdl, num_warps=1,
            launch_pdl=pdl,
        )  # fmt: skip
        q, table = turned, None
    kernels().split_kernel[(spread.programs, kv_heads, rows)](
        q, keys, values, slots, positions, partial, state, math.log2(math.e) * rule.factor(size), table, *norms,
        *q.stride()[:2], 0 if table is None else table.shape[1], LIMIT=joint or 0.0, HEADS=of_packed(kv_heads, group),
        KV_HEADS=kv_heads, GROUP=group, QUERIES=max(16, queries), SIZE=size, LENGTH=length,
        SPLITS=splits, EACH=spread.each, STEP=spread.step, STAGES=2 if room and spread.each * spread.step > 1 else 1,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return Splits(partial, state, positions)


def of_packed(kv_heads: int, group: int) -> int:
    """Return the number of heads of q, k and v, as a power of two."""
    return 1 << (kv_heads * (group + 2) - 1).bit_length()


def _turn_jointly(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, rotary: Rotary, limit: float
) -> Tensor:
    """Return the queries of a packed projection, normalised over all heads and rotated, and write k and v."""
    from dtgpt.ops.kernels.attention.joint_kernels import joint_rotate_kernel  # imported on first use: needs Triton

    (rows, kv_heads, group, size), pdl = q.shape, has_hopper(q.device)
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    joint_rotate_kernel[(kv_heads, rows)](
        q, turned, keys, values, slots, positions, *rotary, q.stride(0), rotary.table.shape[1], LIMIT=limit,
        KV_HEADS=kv_heads, GROUP=group, QUERIES=1 << (group - 1).bit_length(),
        HEADS=of_packed(kv_heads, group), SIZE=size, LENGTH=keys.shape[2], PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return turned


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    rule: AttentionRule = PLAIN_RULE,
) -> Tensor:
    """Write k and v `[B, N_kv, D]` as `attend_rows` does, and return the attention `[B, N, D]` of q
    `[B, N_kv, N / N_kv, D]`, with the bits that `flash_attention` gives the last query of each sequence. rule: its
    scale counts here."""
    from dtgpt.ops.kernels.attention.exact_kernels import exact_kernel  # imported on first use, since it needs Triton

    (rows, kv_heads, group, size), length = q.shape, keys.shape[2]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.empty(rows, kv_heads * group, size, dtype=q.dtype, device=q.device)
    how = exact_launch(q.dtype, kv_heads * group, kv_heads, size, rows, q.device)
    exact_kernel[(kv_heads, rows)](
        q, k, v, keys, values, slots, positions, out, *q.stride()[:2], *k.stride()[:2],
        LOG2_E * rule.factor(size), KV_HEADS=kv_heads, GROUP=group, SIZE=size, LENGTH=length,
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


ATTEND_ROWS = (
    by_triton(
        _attend_rows,
        _takes_rows,
        "heads of 16, 32, 64, 128 or 256, whose keys and values of 128 positions fit in shared memory; scores are not "
        "bounded softly",
    ),
)
WRITE_PROMPTS = (by_triton(_write_prompts),)
