"""What a matrix in 4 bits consists of: its tensors, and the numbers that their integers stand for."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, GROUP = 64, 256
# Quantiles of the normal distribution, with a zero of its own: appendix E of the paper.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Of both signs, for each power of ten from 1e-6 to 1, the middles of the 2^i equal parts of its upper nine tenths; zero
# and one (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": dynamic tree quantisation).
_MAGNITUDES = [10.0 ** (i - 6) * (0.1 + 0.9 * (part + 0.5) / 2**i) for i in range(7) for part in range(2**i)]
STEPS = tuple(sorted([*_MAGNITUDES, *(-step for step in _MAGNITUDES), 0.0, 1.0]))


class Nf4(NamedTuple):
    """A matrix `[out, in]` in 4 bits, uint8."""

    codes: Tensor  # [out, in / 2], two indices of VALUES in a byte, the first in its upper half
    scales: Tensor  # [out, in / BLOCK], indices of STEPS
    groups: Tensor  # [1 + groups, 4], the bytes of fp32 numbers: the mean, and the largest rest of each group


class Place(NamedTuple):
    """Where a part of a matrix begins."""

    row: int
    block: int  # of a row
    blocks: int  # of a whole row


def shapes(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the shapes of the parts of an `Nf4` of so many rows and columns."""
    blocks = columns // BLOCK
    groups = -(-rows * blocks // GROUP)
    return (rows, columns // 2), (rows, blocks), (1 + groups, 4)


def whole(matrix: Nf4) -> Place:
    """Return the place of all of a matrix."""
    return Place(0, 0, matrix.scales.shape[1])


@lru_cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return VALUES and STEPS, fp32 on a device."""
    return torch.tensor(VALUES, device=device), torch.tensor(STEPS, device=device)
