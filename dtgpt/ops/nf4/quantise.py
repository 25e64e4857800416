"""Matrices in 4 bits: NormalFloat, with scales that are quantised, too (Dettmers et al. 2023, "QLoRA", section 3).

Each BLOCK of neighbouring values of a row is divided by its largest magnitude, and what is left becomes the nearest of
16 VALUES. The largest magnitudes, less their mean over the matrix, are divided by the largest of each GROUP of them, in
the order of rows, and become the nearest of 256 STEPS. An element takes 4 + 8 / BLOCK + 32 / (BLOCK GROUP) bits, 4.127.

The result is a function of the matrix alone, bit for bit: nothing here depends on the device, on the number of threads
or on the ranks that hold parts. So the mean is a sum of integers, which has no order, and what makes a matrix of 4 bits
sees all of it. Reference: `reference`. Fast path: a Triton kernel with the same bits. Sharding rule: a shard of whole
blocks is read by its place in the matrix (`Place`).
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.kernels.devices import has_triton
from dtgpt.ops.nf4.form import BLOCK, GROUP, STEPS, VALUES, Nf4, Place, tables

FRACTION = 32  # bits behind the point of the integers whose sum gives the mean, of the largest magnitude
AT_ONCE = 1 << 16  # blocks that are rounded at a time


@lru_cache
def _boundaries(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the middles between neighbouring values, and steps."""
    values, steps = (torch.tensor(each, dtype=torch.float64) for each in (VALUES, STEPS))
    return tuple(((each[1:] + each[:-1]) / 2).float().to(device) for each in (values, steps))  # type: ignore[return-value]


@torch.no_grad()
def quantise(matrix: Tensor) -> Nf4:
    """Return a matrix `[out, in]`, `in` a multiple of BLOCK, in 4 bits. Raise ValueError where it has a value that is
    not finite: a whole group would lose its scale."""
    between_values, between_steps = _boundaries(matrix.device)
    tables(matrix.device)  # before the first pass: a CUDA graph that captures it takes no copies from the host
    blocks = matrix.float().reshape(-1, BLOCK)
    largest = blocks.abs().amax(1)
    top = largest.max().double()
    if not top.isfinite():
        raise ValueError("it has a value that is not finite")
    codes = matrix.new_empty(len(blocks), BLOCK // 2, dtype=torch.uint8)
    for part, scale, place in zip(*(each.split(AT_ONCE) for each in (blocks, largest, codes)), strict=True):
        nearest = torch.bucketize(part / _or_one(scale)[:, None], between_values, out_int32=True)
        place.copy_(nearest[:, ::2] << 4 | nearest[:, 1::2])
    # The same sum in any order. Every magnitude is at most the top: 2^31 blocks do not fill 63 bits.
    fractions = (largest.double() * (2.0**FRACTION / _or_one(top))).round().to(torch.int64)
    mean = (fractions.sum().double() / len(largest) * (top / 2.0**FRACTION)).float()
    rest = F.pad(largest - mean, (0, -len(largest) % GROUP)).view(-1, GROUP)
    peaks = rest.abs().amax(1)
    scales = torch.bucketize(rest / _or_one(peaks)[:, None], between_steps, out_int32=True).to(torch.uint8)
    rows, columns = matrix.shape
    return Nf4(
        codes.view(rows, columns // 2),
        scales.flatten()[: len(largest)].reshape(rows, columns // BLOCK),
        torch.cat([mean.view(1), peaks]).view(torch.uint8).view(-1, 4),
    )


def _or_one(divisors: Tensor) -> Tensor:
    """Return the divisors with ones for zeros: what is to be divided is zero there, too."""
    return torch.where(divisors == 0, 1.0, divisors)


def reference(
    codes: Tensor, scales: Tensor, groups: Tensor, row: int, block: int, blocks: int, dtype: torch.dtype
) -> Tensor:
    """Return the matrix, or a part of it, in plain torch: the test oracle."""
    values, steps = tables(codes.device)
    mean, peaks = groups.view(torch.float32).flatten().split([1, len(groups) - 1])
    rows, here = (torch.arange(size, device=codes.device) for size in scales.shape)
    group = ((row + rows)[:, None] * blocks + block + here) // GROUP
    largest = steps[scales.int()] * peaks[group] + mean
    pairs = torch.stack([codes >> 4, codes & 15], -1).view(*scales.shape, BLOCK)
    return (values[pairs.int()] * largest[..., None]).to(dtype).flatten(1)


def dequantise(matrix: Nf4, place: Place, dtype: torch.dtype) -> Tensor:
    """Return a matrix in 4 bits, or a part of it at this place, `[out, in]` in `dtype`. Not differentiable."""
    return _dequantise(*(each.to(torch.uint8) for each in matrix), *place, dtype)


def kernels():
    from dtgpt.ops.kernels import nf4_kernels  # imported on first use, since it needs Triton

    return nf4_kernels


_dequantise = torch.library.custom_op("dtgpt::dequantise_nf4", reference, mutates_args=(), device_types="cpu")
_dequantise.register_kernel(
    "cuda", lambda codes, *rest: (kernels().dequantise if has_triton(codes) else reference)(codes, *rest)
)


@_dequantise.register_fake
def _(codes, scales, groups, row, block, blocks, dtype):
    return codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)
