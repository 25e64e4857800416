"""Triton kernels that put tensors into each other's memory.

A rank has two areas, for calls of even and of odd number, each with a place for the part of every rank: [2, ranks,
capacity] elements, and behind them a flag of each program of every rank. A program writes its share of the call to the
other ranks, then its flag, waits for the flags of the same program of the others, and reads what they wrote.

No rank overwrites what another one still reads: the kernel of call n + 2 begins when that of n + 1 has ended, for which
all programs of every other rank had begun call n + 1, and thus had ended call n. All ranks make the same calls in the
same order, each on one stream, with the same number of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

BLOCK = 8192  # elements that a program moves at once
WARPS = 16
PATIENCE = tl.constexpr(600 * 1000**3)  # nanoseconds until a rank whose peer has ended fails, too


@triton.jit
def _place(addresses, target, source, call, capacity, like, RANKS: tl.constexpr):
    """Return where rank `source` puts its part on rank `target`, as a pointer of the type of `like`."""
    start = tl.load(addresses + target).to(like.dtype)
    return tl.multiple_of(start + ((call % 2) * RANKS + source).to(tl.int64) * capacity, 16)


@triton.jit
def _flag(flags, target, source, program):
    first = tl.load(flags + target).to(tl.pointer_type(tl.int32))
    return first + source * tl.num_programs(0) + program


@triton.jit
def meet(flags, program, call, RANK: tl.constexpr, RANKS: tl.constexpr):
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
    part, whole, addresses, calls, rows, inner, capacity, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
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
                place = _place(addresses, peer, RANK, call, capacity, part, RANKS)
                tl.store(place + row * inner + column, x, inside)
        tl.store(whole + (row * RANKS + RANK) * inner + column, x, inside)
    meet(addresses + RANKS, program, call, RANK, RANKS)
    for tile in range(program, rows * tiles, tl.num_programs(0)):
        row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK + columns
        inside = column < inner
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = _place(addresses, RANK, peer, call, capacity, part, RANKS)
                x = tl.load(place + row * inner + column, inside, cache_modifier=".cg")
                tl.store(whole + (row * RANKS + peer) * inner + column, x, inside)
    tl.store(calls + program, call)


@triton.jit
def _sum_kernel(
    whole, part, addresses, calls, rows, inner, capacity, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
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
                place = _place(addresses, peer, RANK, call, capacity, part, RANKS)
                tl.store(place + row * inner + column, x, inside)
    meet(addresses + RANKS, program, call, RANK, RANKS)
    for tile in range(program, rows * tiles, tl.num_programs(0)):
        row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK + columns
        inside = column < inner
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(RANKS):  # in the order of the ranks, on every rank
            if source == RANK:
                x = tl.load(whole + (row * RANKS + RANK) * inner + column, inside)
            else:
                place = _place(addresses, RANK, source, call, capacity, part, RANKS)
                x = tl.load(place + row * inner + column, inside, cache_modifier=".cg")
            total = x.to(tl.float32) if source == 0 else total + x.to(tl.float32)
        tl.store(part + row * inner + column, total.to(part.dtype.element_ty), inside)
    tl.store(calls + program, call)


def launch_gather(
    part: Tensor, whole: Tensor, addresses: Tensor, calls: Tensor, rows: int, capacity: int, rank: int, ranks: int
) -> None:
    """Fill `whole [rows, ranks, inner]` with the contiguous `part [rows, inner]` of each rank. addresses: int64 `[2,
    ranks]` of areas and flags. capacity: elements of a place. calls: int32 `[programs]`, calls that
    were made."""
    with torch.cuda.device(part.device):
        _gather_kernel[(len(calls),)](
            part, whole, addresses, calls, rows, part.numel() // rows, capacity, RANK=rank, RANKS=ranks, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip


def launch_sum(
    whole: Tensor, part: Tensor, addresses: Tensor, calls: Tensor, rows: int, capacity: int, rank: int, ranks: int
) -> None:
    """Fill `part [rows, inner]` with this rank's part of the sum over the ranks, in fp32, of the contiguous `whole
    [rows, ranks, inner]`. Other arguments as in `launch_gather`."""
    with torch.cuda.device(part.device):
        _sum_kernel[(len(calls),)](
            whole, part, addresses, calls, rows, part.numel() // rows, capacity, RANK=rank, RANKS=ranks, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
