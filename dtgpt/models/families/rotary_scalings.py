"""Scalings of rotary positions for contexts that are longer than those of the model before."""

import math

import torch
from torch import Tensor

from dtgpt.ops.rotary_positions import Rotation


def scaled(rotation: Rotation, waves: Tensor) -> Tensor:
    """Return the frequencies of waves `[n]`, each 2 pi times shorter than the wave in positions."""
    if rotation.scaling == "yarn":
        return _yarn(rotation, waves)
    kept = 1.0 / waves
    return kept / rotation.factor if rotation.scaling == "linear" else _llama3(rotation, kept)


def _llama3(rotation: Rotation, kept: Tensor) -> Tensor:
    length, low, high = rotation.original_length, rotation.low_frequency, rotation.high_frequency
    waves = 2 * math.pi / kept
    divided = torch.where(waves > length / low, kept / rotation.factor, kept)
    fraction = (length / waves - low) / (high - low)
    blended = (1 - fraction) * divided / rotation.factor + fraction * divided
    between = ~(waves < length / high) & ~(waves > length / low)
    return torch.where(between, blended, divided)


def _yarn(rotation: Rotation, waves: Tensor) -> Tensor:
    """Return the frequencies of waves `[n]`, each 2 pi times shorter than the wave in positions."""
    columns = 2 * len(waves)

    def index(count: float) -> float:
        """Return the index of the column whose frequency has `count` waves in the original length."""
        return columns * math.log(rotation.original_length / (count * 2 * math.pi)) / (2 * math.log(rotation.theta))

    first, last = index(rotation.beta_fast), index(rotation.beta_slow)
    if rotation.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, columns - 1)
    last += 0.001 if first == last else 0.0
    kept = 1 - ((torch.arange(len(waves), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rotation.factor * waves) * (1 - kept) + 1.0 / waves * kept
