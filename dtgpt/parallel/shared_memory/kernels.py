"""Triton kernels that write to the memory of other ranks, or wait for what these write.

Programs of all ranks wait for each other at barriers: each counts its calls on the device, so that a CUDA graph can be
replayed, tells the same program of the other ranks the number of the call, and waits until they have told theirs.

A gather or a sum has two areas on each rank, for calls of even and of odd number, each with a place for the part of
every rank: `[2, ranks, capacity]` elements. A program writes its pieces of the call to the other ranks, comes to its
barrier, and reads what the same program of the others wrote. No rank overwrites what another one still reads: the
kernel of call n + 2 begins when that of n + 1 has ended, for which all programs of every other rank had begun call
n + 1, and thus had ended call n. All ranks make the same calls in the same order, each on one stream, with the same
number of programs.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

BLOCK, WARPS = 8192, 16  # of gathers and sums; BLOCK: elements that a program moves at once
ADD_BLOCK, ADD_WARPS = 4096, 8
PATIENCE = tl.constexpr(600 * 1000**3)  # nanoseconds until a rank whose peer has ended fails, too


class Barrier(Protocol):
    """What a kernel takes of a `dtgpt.parallel.shared_memory.barrier.Barrier`."""

    flags: Tensor
    calls: Tensor
    rank: int
    ranks: int


@triton.jit
def _place(areas, target, source, call, capacity, like, RANKS: tl.constexpr):
    """Return where rank `source` puts its part on rank `target`, as a pointer of the type of `like`."""
    start = tl.load(areas + target).to(like.dtype)
    return tl.multiple_of(start + ((call % 2) * RANKS + source).to(tl.int64) * capacity, 16)


@triton.jit
def _flag(flags, target, source, program):
    first = tl.load(flags + target).to(tl.pointer_type(tl.int32))
    return first + source * tl.num_programs(0) + program


@triton.jit
def _barrier(flags, program, call, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell the same program of the other ranks that this one has written, and wait until they have. flags: addresses of
    the flags of each rank."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.atomic_xchg(_flag(flags, peer, RANK, program), call, sem="release", scope="sys")
    first = globaltimer()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = _flag(flags, RANK, peer, program)
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call < 0:
                if globaltimer() - first > PATIENCE:
                    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [call], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _gather_kernel(
    part,
    whole,
    areas,
    flags,
    calls,
    rows,
    inner,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    tiles = tl.cdiv(inner, BLOCK)
    columns = tl.arange(0, BLOCK)
    for tile in range(program, rows * tiles, tl.num_programs(0)):
        row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK + columns
        inside = column < inner
        x = tl.load(part + row * inner + column, inside)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = _place(areas, peer, RANK, call, capacity, part, RANKS)
                tl.store(place + row * inner + column, x, inside)
        tl.store(whole + (row * RANKS + RANK) * inner + column, x, inside)
    _barrier(flags, program, call, RANK, RANKS)
    for tile in range(program, rows * tiles, tl.num_programs(0)):
        row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK + columns
        inside = column < inner
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = _place(areas, RANK, peer, call, capacity, part, RANKS)
                x = tl.load(place + row * inner + column, inside, cache_modifier=".cg")
                tl.store(whole + (row * RANKS + peer) * inner + column, x, inside)
    tl.store(calls + program, call)


@triton.jit
def _sum_kernel(
    whole,
    part,
    areas,
    flags,
    calls,
    rows,
    inner,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    tiles = tl.cdiv(inner, BLOCK)
    columns = tl.arange(0, BLOCK)
    for tile in range(program, rows * tiles, tl.num_programs(0)):
        row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK + columns
        inside = column < inner
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                x = tl.load(whole + (row * RANKS + peer) * inner + column, inside)
                place = _place(areas, peer, RANK, call, capacity, part, RANKS)
                tl.store(place + row * inner + column, x, inside)
    _barrier(flags, program, call, RANK, RANKS)
    for tile in range(program, rows * tiles, tl.num_programs(0)):
        row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK + columns
        inside = column < inner
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(RANKS):  # in the order of the ranks, on every rank
            if source == RANK:
                x = tl.load(whole + (row * RANKS + RANK) * inner + column, inside)
            else:
                place = _place(areas, RANK, source, call, capacity, part, RANKS)
                x = tl.load(place + row * inner + column, inside, cache_modifier=".cg")
            total = x.to(tl.float32) if source == 0 else total + x.to(tl.float32)
        tl.store(part + row * inner + column, total.to(part.dtype.element_ty), inside)
    tl.store(calls + program, call)


@triton.jit
def _barrier_kernel(flags, calls, RANK: tl.constexpr, RANKS: tl.constexpr):
    call = tl.load(calls) + 1
    _barrier(flags, 0, call, RANK, RANKS)
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


@triton.jit
def _wait_kernel(flag):
    first = globaltimer()
    while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
        if globaltimer() - first > PATIENCE:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [1], tl.int32, is_pure=False, pack=1)


def launch_gather(part: Tensor, whole: Tensor, areas: Tensor, barrier: Barrier, rows: int, capacity: int) -> None:
    """Fill `whole [rows, ranks, inner]` with the contiguous `part [rows, inner]` of each rank. areas: addresses int64
    `[ranks]`. barrier: with a program for each program of the kernel. capacity: elements of a place."""
    with torch.cuda.device(part.device):
        _gather_kernel[(len(barrier.calls),)](
            part,
            whole,
            areas,
            barrier.flags,
            barrier.calls,
            rows,
            part.numel() // rows,
            capacity,
            RANK=barrier.rank,
            RANKS=barrier.ranks,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def launch_sum(whole: Tensor, part: Tensor, areas: Tensor, barrier: Barrier, rows: int, capacity: int) -> None:
    """Fill `part [rows, inner]` with this rank's part of the sum over the ranks, in fp32, of the contiguous `whole
    [rows, ranks, inner]`. Other arguments are those of `launch_gather`."""
    with torch.cuda.device(part.device):
        _sum_kernel[(len(barrier.calls),)](
            whole,
            part,
            areas,
            barrier.flags,
            barrier.calls,
            rows,
            part.numel() // rows,
            capacity,
            RANK=barrier.rank,
            RANKS=barrier.ranks,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def launch_barrier(barrier: Barrier) -> None:
    """Hold the current stream until that of every rank has come to the barrier, which has one program."""
    with torch.cuda.device(barrier.calls.device):
        _barrier_kernel[(1,)](barrier.flags, barrier.calls, RANK=barrier.rank, RANKS=barrier.ranks, num_warps=1)


def launch_add(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
    """Set `out [n]` to the sum, in fp32 and in the order of the ranks, of `own [n]`, which may be `out`, and the
    contiguous `others [ranks - 1, n]`."""
    rows, size = others.shape
    with torch.cuda.device(own.device):
        _add_kernel[(triton.cdiv(size, ADD_BLOCK),)](
            own, others, out, size, RANK=rank, RANKS=rows + 1, BLOCK=ADD_BLOCK, num_warps=ADD_WARPS
        )


def launch_wait(flag: Tensor) -> None:
    """Hold the current stream until the int32 `flag [1]` is 1, and set it to 0."""
    with torch.cuda.device(flag.device):
        _wait_kernel[(1,)](flag, num_warps=1)
