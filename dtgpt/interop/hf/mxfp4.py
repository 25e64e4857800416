"""Matrices of 4 bits a value, MXFP4 (Open Compute Project 2023, OCP Microscaling Formats, section 5.3): a byte has two
values, the one of the smaller column in its low bits, and 32 values of a row share a scale, a power of two."""

import torch
from torch import Tensor

GROUP = 32  # values of a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the 3 low bits; the fourth is the sign
BIAS = 127  # of the exponent of a scale


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values fp32 `[.., C]` of blocks uint8 `[.., C / 32, 16]` with scales uint8 `[.., C / 32]`, exact."""
    known = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(known[pairs.int()], scales.int()[..., None] - BIAS).flatten(-2)
