"""Triton kernels beside copies to the memory of other ranks: a meeting of the ranks, and the sum of what came."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.collectives.peer_kernels import meet

BLOCK = 4096
WARPS = 8


@triton.jit
def _meet_kernel(flags, calls, RANK: tl.constexpr, RANKS: tl.constexpr):
    call = tl.load(calls) + 1
    meet(flags, 0, call, RANK, RANKS)
    tl.store(calls, call)


@triton.jit
def _add_kernel(own, others, out, size, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):  # in the order of the ranks, on every rank
        if source == RANK:
            x = tl.load(own + place, inside)
        else:
            row = source if source < RANK else source - 1
            x = tl.load(others + row * size.to(tl.int64) + place, inside)
        total = x.to(tl.float32) if source == 0 else total + x.to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def launch_meet(flags: Tensor, calls: Tensor, rank: int, ranks: int) -> None:
    """Wait on the device until every rank has come here. flags: int64 `[ranks]`, addresses of the int32 `[ranks]` of
    each rank. calls: int32 `[1]`, meetings that took place."""
    with torch.cuda.device(calls.device):
        _meet_kernel[(1,)](flags, calls, RANK=rank, RANKS=ranks, num_warps=1)


def launch_add(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
    """Set `out` as `pushes.add` does."""
    rows, size = others.shape
    with torch.cuda.device(own.device):
        _add_kernel[(triton.cdiv(size, BLOCK),)](
            own, others, out, size, RANK=rank, RANKS=rows + 1, BLOCK=BLOCK, num_warps=WARPS
        )
