"""Random numbers on a CPU without delay: Philox by NumPy, the words of `dtgpt.ops.random.philox` and masks of `dropout`
bit for bit, for few evaluations; and dropout itself."""

import math
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtgpt.ops.random.dropout import (
    DROPOUT,
    EVALUATIONS,
    GROUP,
    HALF,
    LANES,
    LOW_DIGITS,
    SHARED_ROWS,
    SHARING,
    bit_of_lane,
)
from dtgpt.ops.random.philox import FEW, MASK, MULTIPLIERS, ROUNDS, WEYL, covering_blocks

# On a CPU, torch takes longer to start an operation than to compute few words. NumPy starts sooner, and both
# multiplications of a round are one operation of it. More than FEW evaluations are left to torch.
MASKS = 64  # of a kind that are kept, since backward asks again for what forward did: 12 MiB at most
LOW_WORD, WORD_BITS = np.uint64(MASK), np.uint64(32)
FACTORS = np.array(MULTIPLIERS, np.uint64)
ADDED = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)  # to the key before each round
BIT_OF_LANE = bit_of_lane(np.arange(HALF, dtype=np.uint32))


def block_words(key: Tensor, leading: Sequence[range | Tensor], blocks: range) -> Any:
    """Return the words of `block_words` as an array of uint32, `[*key batch, *leading, blocks, 4]`; None for many. The
    key is a plain one on the CPU."""
    if not _are_few(key, *leading, blocks):
        return None
    return _words(*_read(key), blocks, *reversed(leading))


def _are_few(key: Tensor, *indices: Sequence[int] | Tensor) -> bool:
    return key.numel() // 2 * math.prod(map(len, indices)) <= FEW


def _read(key: Tensor) -> tuple[tuple[int, ...], bytes]:
    """Return the batch and the bytes of a key, of which masks are kept."""
    return tuple(key.shape[:-1]), key.numpy().tobytes()


def keep_mask(key: Tensor, ranges: Sequence[range], drop: int) -> Tensor | None:
    """Return what `dropout.keep_mask` does for this threshold; None for many evaluations."""
    if not _are_few(key, *ranges[:-1], covering_blocks(ranges[-1], LANES)[0]):
        return None
    return torch.from_numpy(_kept(*_read(key), drop, *ranges).copy())


def attention_mask(key: Tensor, ranges: Sequence[range], drop: int) -> Tensor | None:
    """Return what `dropout.attention_mask` does for this threshold; None for many evaluations."""
    if not _are_few(key, *ranges[:-1], covering_blocks(ranges[-1], GROUP)[0], range(EVALUATIONS)):
        return None
    return torch.from_numpy(_kept_in_attention(*_read(key), drop, *ranges).copy())


@lru_cache(MASKS)
def _kept(batch: tuple[int, ...], key: bytes, drop: int, *ranges: range) -> Any:
    *leading, last = ranges
    blocks, cut = covering_blocks(last, LANES)
    halves = _words(batch, key, blocks, *reversed(leading)).view("<u2")  # of each word the low one, then the high one
    return halves.reshape(*halves.shape[:-2], len(blocks) * LANES)[..., cut] >= drop


@lru_cache(MASKS)
def _kept_in_attention(batch: tuple[int, ...], key: bytes, drop: int, *ranges: range) -> Any:
    """Return the decisions of `dropout.keep_words`, one by one, by words of 32 bits."""
    *leading, rows, columns = ranges
    groups, cut = covering_blocks(columns, GROUP)
    blocks = range(EVALUATIONS * groups.start, EVALUATIONS * groups.stop)
    shared_rows = [row & (SHARING - 1) | SHARED_ROWS for row in rows[:SHARING]]
    words = _words(batch, key, blocks, [*rows, *shared_rows], *reversed(leading))  # one draw, whose start costs most
    words = words.reshape(*words.shape[:-2], len(groups), 2, 8)
    own, shared = words[..., : len(rows), :, :, :], words[..., len(rows) :, :, :1, :]
    shared = shared.take(np.arange(len(rows)) % SHARING, axis=-4)
    kept = np.full(own.shape[:-1], MASK, np.uint32)
    for digit in range(16):
        word = shared[..., digit] if digit < LOW_DIGITS else own[..., digit - LOW_DIGITS]
        (np.bitwise_and if drop >> digit & 1 else np.bitwise_or)(kept, word, out=kept)
    lanes = kept[..., None] >> BIT_OF_LANE & 1
    return lanes.reshape(*kept.shape[:-2], len(groups) * GROUP)[..., cut].astype(bool)


def _words(batch: tuple[int, ...], key: bytes, *axes: Sequence[int] | Tensor) -> Any:
    """Return the words of a key of int64 `[*batch, 2]`. axes: indices of each dimension, the last one first."""
    shape, dims = (*batch, *map(len, reversed(axes))), len(axes)
    counter = np.zeros((4, *shape), np.uint64)
    for axis, r in enumerate(axes):
        column = np.arange(r.start, r.stop, r.step, dtype=np.int64) if isinstance(r, range) else np.asarray(r, np.int64)
        counter[axis] = (column.astype(np.uint64) & LOW_WORD).reshape(-1, *[1] * axis)
    keys = np.frombuffer(key, np.uint64).reshape(*batch, 2) + ADDED.reshape(ROUNDS, *[1] * len(batch), 2)
    keys = np.moveaxis(keys & LOW_WORD, -1, 1).reshape(ROUNDS, 2, *batch, *[1] * dims)
    factors = FACTORS.reshape(2, *[1] * len(shape))
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for words in keys:
        product = even * factors
        even, odd = (product >> WORD_BITS)[::-1] ^ odd ^ words, (product & LOW_WORD)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=-1).astype("<u4")


class _Dropout(torch.autograd.Function):
    """The operation `dtgpt::dropout` without PyTorch's layers around an operation, which take longer than it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(key)
        ctx.settings = settings
        return DROPOUT(x, key, *settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (key,) = ctx.saved_tensors
        return DROPOUT(grad, key, *ctx.settings), None, None, None, None


# What `dtgpt.ops.random.philox.few_numbers` returns.
FEW_NUMBERS = SimpleNamespace(
    words=block_words, keep_mask=keep_mask, attention_mask=attention_mask, dropout=_Dropout.apply
)
