"""Angles of rotary positions (Su et al. 2021, RoFormer, section 3.2), with scalings for longer contexts.

The cosines and sines are computed in fp32 and stay so, whatever the dtype of a model: bf16 cannot tell large positions
apart. The frequencies are those of Hugging Face's transformers.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Scaling = Literal["llama3", "linear", "yarn"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


class Rotation(NamedTuple):
    """What the angles of a model follow from. `scaling`, by `factor`, where that is not 1:

    llama3: frequencies whose wave is longer than `original_length / low_frequency` positions are divided by `factor`,
    those shorter than `original_length / high_frequency` are kept, those between are blended (Dubey et al. 2024, The
    Llama 3 Herd of Models).
    linear: all are divided (Chen et al. 2023, Position Interpolation).
    yarn: frequencies with more than `beta_fast` waves in `original_length` positions are kept, those with fewer than
    `beta_slow` are divided, those between are blended by their index (Peng et al. 2023, YaRN, section 3.2).

    `truncate`: whether the indices between which YaRN blends are rounded outwards. `amplitude` multiplies cosines and
    sines. `rotated`: the fraction of the pairs of columns that rotate, the first ones; the others keep the angle 0.
    """

    theta: float = 10000.0  # base of the frequencies
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192
    rotated: float = 1.0
    scaling: Scaling = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    @property
    def numbers(self) -> list[float]:
        """The fields as numbers, which operations take."""
        return [float(SCALINGS.index(value)) if isinstance(value, str) else float(value) for value in self]


def rotation_of(numbers: Sequence[float]) -> Rotation:
    """Return the rotation of which these are the `numbers`."""
    values: dict[str, Any] = dict(zip(Rotation._fields, numbers, strict=True))
    whole, kind, flag = (values[name] for name in ("original_length", "scaling", "truncate"))
    return Rotation(**values | {"original_length": int(whole), "scaling": SCALINGS[int(kind)], "truncate": bool(flag)})


def amplitude_of_yarn(factor: float) -> float:
    """Return what cosines and sines are multiplied by under YaRN, unless a model says otherwise (Peng et al. 2023,
    equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def frequencies(rotation: Rotation, head_dim: int) -> Tensor:
    """Return the angle between two positions of each pair of columns, fp32 `[D / 2]` on the CPU."""
    with torch.device("cpu"):
        pairs = round(rotation.rotated * (head_dim // 2))
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.int64).float() / (2 * pairs)
        fixed = torch.zeros(head_dim // 2 - pairs)
        waves = rotation.theta**exponents
        if rotation.scaling == "yarn":
            return torch.cat([_yarn(rotation, waves), fixed])
        kept = torch.cat([1.0 / waves, fixed])
    if rotation.factor == 1:
        return kept
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


@cache  # without bound: CUDA graphs read the memory of tables that they were captured with
def angle_table(rotation: Rotation, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Return cosine and sine of each angle, fp32 `[2, positions, D / 2]`. The table is made once for each device."""
    with torch.inference_mode(False), torch.no_grad():
        places = torch.arange(positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(places, frequencies(rotation, head_dim))
        return (torch.stack([angles.cos(), angles.sin()]) * rotation.amplitude).to(device)
