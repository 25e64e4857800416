"""Angles of rotary positions (Su et al. 2021, RoFormer, section 3.2), with Llama 3.1's scaling for longer contexts.

The cosines and sines are computed in fp32 and stay so, whatever the dtype of a model: bf16 cannot tell large positions
apart. The frequencies are those of Hugging Face's transformers.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """What the angles of a model follow from. Frequencies whose wave is longer than `original_length /
    low_frequency` positions are divided by `factor`, those shorter than `original_length / high_frequency` are kept,
    those between are blended (Dubey et al. 2024, The Llama 3 Herd of Models). A factor of 1: all are kept. `rotated`:
    the fraction of the pairs of columns that rotate, the first ones; the others keep the angle 0."""

    theta: float = 10000.0  # base of the frequencies
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192
    rotated: float = 1.0


def frequencies(rotation: Rotation, head_dim: int) -> Tensor:
    """Return the angle between two positions of each pair of columns, fp32 `[D / 2]` on the CPU."""
    with torch.device("cpu"):
        pairs = round(rotation.rotated * (head_dim // 2))
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.int64).float() / (2 * pairs)
        kept = torch.cat([1.0 / rotation.theta**exponents, torch.zeros(head_dim // 2 - pairs)])
    if rotation.factor == 1:
        return kept
    length, low, high = rotation.original_length, rotation.low_frequency, rotation.high_frequency
    waves = 2 * math.pi / kept
    divided = torch.where(waves > length / low, kept / rotation.factor, kept)
    fraction = (length / waves - low) / (high - low)
    blended = (1 - fraction) * divided / rotation.factor + fraction * divided
    between = ~(waves < length / high) & ~(waves > length / low)
    return torch.where(between, blended, divided)


@cache  # without bound: CUDA graphs read the memory of tables that they were captured with
def angle_table(rotation: Rotation, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Return cosine and sine of each angle, fp32 `[2, positions, D / 2]`. The table is made once for each device."""
    with torch.inference_mode(False), torch.no_grad():
        places = torch.arange(positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(places, frequencies(rotation, head_dim))
        return torch.stack([angles.cos(), angles.sin()]).to(device)
