"""Philox for few words on a CPU, where torch takes longer to start an operation than to compute it.

NumPy starts sooner, and both multiplications of a round are one operation of it. The words are those of `philox`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEW = 1 << 13  # evaluations; more are left to torch, which has several threads
ROUNDS = 10
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
MASK, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
FACTORS = np.array(MULTIPLIERS, np.uint64)
ADDED = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)  # to the key before each round


def are_few(key: Tensor, leading: Sequence[range | Tensor], blocks: range) -> bool:
    """Return whether `few_words` is to draw these words: few of them, of a plain key on the CPU, and not compiled."""
    if torch.compiler.is_compiling() or type(key) is not Tensor or key.device.type != "cpu":
        return False
    return key.numel() // 2 * math.prod(map(len, leading)) * len(blocks) <= FEW


def few_words(key: Tensor, leading: Sequence[range | Tensor], blocks: range) -> Any:
    """Return the words of `philox.block_words` as an array of uint32, `[*key batch, *leading, blocks, 4]`."""
    batch, dims = tuple(key.shape[:-1]), len(leading) + 1
    shape = (*batch, *map(len, leading), len(blocks))
    counter = np.zeros((4, *shape), np.uint64)
    for axis, indices in enumerate([blocks, *reversed(leading)]):
        if isinstance(indices, Tensor):
            column = indices.numpy()
        else:
            column = np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
        column = column.astype(np.uint64) & MASK
        counter[axis] = column.reshape(-1, *[1] * axis)
    keys = (key.numpy().astype(np.uint64) + ADDED.reshape(ROUNDS, *[1] * len(batch), 2)) & MASK
    keys = np.moveaxis(keys, -1, 1).reshape(ROUNDS, 2, *batch, *[1] * dims)
    factors = FACTORS.reshape(2, *[1] * len(shape))
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for words in keys:
        product = even * factors
        even, odd = (product >> HALF)[::-1] ^ odd ^ words, (product & MASK)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=-1).astype("<u4")
