"""Triton kernel of `dtgpt.ops.nf4.quantise`. Needs Triton.

Tables of 16 and 256 numbers are read through the cache, a line of which has all 16: threads that ask for several
numbers of one line wait once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.nf4.form import BLOCK, GROUP, tables

BLOCKS = 32  # of a program


@triton.jit
def dequantise_kernel(
    codes, scales, groups, values, steps, y, count, here, row, block, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute y `[count, BLOCK]` of codes `[count, BLOCK / 2]` and scales `[count]`. here: blocks of a row of the part,
    of which `blocks` are in a row of the whole."""
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = number < count
    group = ((row + number // here) * blocks + block + number % here) // GROUP
    step = tl.load(steps + tl.load(scales + number, inside, 0).to(tl.int32))
    largest = step * tl.load(groups + 1 + group, inside, 0.0) + tl.load(groups)
    half = tl.arange(0, BLOCK // 2)
    pairs = tl.load(codes + number[:, None] * (BLOCK // 2) + half[None, :], inside[:, None], 0).to(tl.int32)
    first, second = tl.load(values + (pairs >> 4)), tl.load(values + (pairs & 15))
    both = tl.reshape(tl.join(first * largest[:, None], second * largest[:, None]), (BLOCKS, BLOCK))
    places = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y + places, both.to(y.dtype.element_ty), inside[:, None])


def dequantise(
    codes: Tensor, scales: Tensor, groups: Tensor, row: int, block: int, blocks: int, dtype: torch.dtype
) -> Tensor:
    """Return what `dtgpt.ops.nf4.quantise.reference` does, with its bits: no product is fused with a sum."""
    y = codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)
    count = scales.numel()
    dequantise_kernel[(triton.cdiv(count, BLOCKS),)](
        codes.contiguous(), scales.contiguous(), groups.contiguous().view(torch.float32), *tables(codes.device), y,
        count, scales.shape[1], row, block, blocks,
        BLOCKS=BLOCKS, BLOCK=BLOCK, GROUP=GROUP, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
