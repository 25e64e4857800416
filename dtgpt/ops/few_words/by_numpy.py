"""Philox by NumPy: the words of `dtgpt.ops.random.philox`, bit for bit, of few evaluations."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from dtgpt.ops.random.philox import FEW, MASK, MULTIPLIERS, ROUNDS, WEYL

# On a CPU, torch takes longer to start an operation than to compute few words. NumPy starts sooner, and both
# multiplications of a round are one operation of it. More than FEW evaluations are left to torch.
MASKS = 64  # answers that are kept, since backward asks again for what forward did: 8 MiB at most
LOW_WORD, WORD_BITS = np.uint64(MASK), np.uint64(32)
FACTORS = np.array(MULTIPLIERS, np.uint64)
ADDED = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)  # to the key before each round


def few_words(key: Tensor, leading: Sequence[range | Tensor], blocks: range) -> Any:
    """Return the words of `block_words` as an array of uint32, `[*key batch, *leading, blocks, 4]`; None for many. The
    key is a plain one on the CPU."""
    if key.numel() // 2 * math.prod(map(len, leading)) * len(blocks) > FEW:
        return None
    axes = [r if isinstance(r, range) else tuple(r.tolist()) for r in (blocks, *reversed(leading))]
    return _words(tuple(key.shape[:-1]), key.numpy().tobytes(), *axes)


@lru_cache(MASKS)
def _words(batch: tuple[int, ...], key: bytes, *axes: Sequence[int]) -> Any:
    """Return the words of a key of int64 `[*batch, 2]`. axes: indices of each dimension, the last one first."""
    shape, dims = (*batch, *map(len, reversed(axes))), len(axes)
    counter = np.zeros((4, *shape), np.uint64)
    for axis, r in enumerate(axes):
        column = np.arange(r.start, r.stop, r.step, dtype=np.int64) if isinstance(r, range) else np.array(r, np.int64)
        counter[axis] = (column.astype(np.uint64) & LOW_WORD).reshape(-1, *[1] * axis)
    keys = np.frombuffer(key, np.uint64).reshape(*batch, 2) + ADDED.reshape(ROUNDS, *[1] * len(batch), 2)
    keys = np.moveaxis(keys & LOW_WORD, -1, 1).reshape(ROUNDS, 2, *batch, *[1] * dims)
    factors = FACTORS.reshape(2, *[1] * len(shape))
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for words in keys:
        product = even * factors
        even, odd = (product >> WORD_BITS)[::-1] ^ odd ^ words, (product & LOW_WORD)[::-1]
    made = np.stack([even[0], odd[0], even[1], odd[1]], axis=-1).astype("<u4")
    made.flags.writeable = False  # the next who asks gets the same array
    return made
