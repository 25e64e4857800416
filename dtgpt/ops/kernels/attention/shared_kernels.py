"""The Triton kernel of `dtgpt.ops.attention.shared`. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns that a program takes, at most


@triton.jit
def sum_kernel(x, table, out, F, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Write a part of one row of the sums `[M, F]`, of x `[N, F]` and the table int64 `[M, COPIES]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in range(COPIES):
        place = tl.load(table + row * COPIES + copy)
        total += tl.load(x + place * F + column, (column < F) & (place >= 0), 0.0).to(tl.float32)
    tl.store(out + row * F + column, total.to(out.dtype.element_ty), column < F)


def launch_sum(x: Tensor, table: Tensor) -> Tensor:
    """Return what `sum_rows` does of a contiguous x."""
    (count, copies), size = table.shape, x.shape[1]
    out = torch.empty(count, size, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(size), BLOCK)
    sum_kernel[(count, triton.cdiv(size, block))](
        x, table, out, size, COPIES=copies, BLOCK=block, num_warps=max(1, block // 512)
    )
    return out
