"""Philox by NumPy: the words of `dtgpt.ops.random.philox`, bit for bit, of few evaluations."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dtgpt.ops.random.philox import MASK, MULTIPLIERS, ROUNDS, WEYL

# On a CPU, torch takes longer to start an operation than to compute few words. NumPy starts sooner, and both
# multiplications of a round are one operation of it.
FEW = 1 << 13  # evaluations; more are left to torch, which has several threads
LOW_WORD, WORD_BITS = np.uint64(MASK), np.uint64(32)
FACTORS = np.array(MULTIPLIERS, np.uint64)
ADDED = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)  # to the key before each round


def few_words(key: Tensor, leading: Sequence[range | Tensor], blocks: range) -> Any:
    """Return the words of `block_words` as an array of uint32, `[*key batch, *leading, blocks, 4]`; None for many. The
    key is a plain one on the CPU."""
    if key.numel() // 2 * math.prod(map(len, leading)) * len(blocks) > FEW:
        return None
    batch, dims = tuple(key.shape[:-1]), len(leading) + 1
    shape = (*batch, *map(len, leading), len(blocks))
    counter = np.zeros((4, *shape), np.uint64)
    for axis, indices in enumerate([blocks, *reversed(leading)]):
        if isinstance(indices, Tensor):
            column = indices.numpy()
        else:
            column = np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
        column = column.astype(np.uint64) & LOW_WORD
        counter[axis] = column.reshape(-1, *[1] * axis)
    keys = (key.numpy().astype(np.uint64) + ADDED.reshape(ROUNDS, *[1] * len(batch), 2)) & LOW_WORD
    keys = np.moveaxis(keys, -1, 1).reshape(ROUNDS, 2, *batch, *[1] * dims)
    factors = FACTORS.reshape(2, *[1] * len(shape))
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for words in keys:
        product = even * factors
        even, odd = (product >> WORD_BITS)[::-1] ^ odd ^ words, (product & LOW_WORD)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=-1).astype("<u4")
