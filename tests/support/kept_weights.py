"""Imported by the fork server of ranks and by pytest workers: initial weights are drawn once in a process.

Weights are a function of a key and of indices, and most runs of tests share both. Draws of more elements are made anew.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from dtgpt.models import decoder

ELEMENTS = 1 << 14  # of float64: 128 KiB
KEPT = 128


def keep(normal: Callable[[Tensor, Sequence[range]], Tensor]) -> Callable[[Tensor, Sequence[range]], Tensor]:
    @lru_cache(KEPT)
    def kept(key: bytes, part: tuple[range, ...]) -> Any:  # of its own memory: tests count that of tensors
        return normal(torch.frombuffer(bytearray(key), dtype=torch.int64), part).numpy().copy()

    @wraps(normal)
    def draw(key: Tensor, part: Sequence[range]) -> Tensor:
        if type(key) is not Tensor or not key.is_cpu or prod(map(len, part)) > ELEMENTS:
            return normal(key, part)
        return torch.from_numpy(kept(key.numpy().tobytes(), tuple(part)))

    return draw


decoder.normal = keep(decoder.normal)
