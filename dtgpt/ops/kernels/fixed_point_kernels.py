"""Triton kernels that add what the ranks of a group sent, as 64-bit integers, and tell what these stand for."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8


@triton.jit
def _add_fixed(
    own, others, out, misfits, size, factor, limit, unit,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.int64)
    beyond = tl.zeros([BLOCK], tl.int32)
    for source in tl.static_range(RANKS):
        row = own if source == 0 else others + tl.cast(size, tl.int64) * ((source - 1) * WIDTH)
        for addend in tl.static_range(WIDTH):
            x = tl.load(row + place * WIDTH + addend, inside, other=0.0).to(tl.float32)
            fits = tl.abs(x) <= limit
            total += (tl.where(fits, x, 0.0) * factor).to(tl.int64)
            beyond += (~fits).to(tl.int32)
    if misfits is None:
        tl.store(out + place, tl.where(beyond == 0, total.to(tl.float32) * unit, float("nan")), inside)
    else:
        if not FIRST:
            total += tl.load(out + place, inside, other=0)
        tl.store(out + place, total, inside)
        if tl.max(beyond, axis=0) > 0:
            tl.atomic_add(misfits, 1)


def launch_add(
    own: Tensor, others: Tensor, out: Tensor, misfits: Tensor | None, fraction: int, limit: float, first: bool
) -> None:
    """Do what `fixed_point.add_integers` does, and without `misfits` `fixed_point.add_rounded`."""
    size, ranks = out.numel(), len(others) + 1
    _add_fixed[(triton.cdiv(size, BLOCK),)](
        own, others, out, misfits, size, 2.0**fraction, limit, 2.0**-fraction, RANKS=ranks,
        WIDTH=own.numel() // size, FIRST=first, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _as_floats(total, unit, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(total + place, place < size, other=0).to(tl.float32)
    tl.store(out + place, value * tl.load(unit), place < size)


def as_floats(total: Tensor, unit: Tensor) -> Tensor:
    """Return what `fixed_point.AS_FLOATS` does. PyTorch reads one element at a time where dtypes differ."""
    out = torch.empty(total.shape, dtype=torch.float32, device=total.device)
    _as_floats[(triton.cdiv(out.numel(), BLOCK),)](total, unit, out, out.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return out
