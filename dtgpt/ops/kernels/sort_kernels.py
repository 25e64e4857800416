"""Triton kernels that rank the scores of experts, and sort rows by expert. Needs Triton. All numbers are whole: results
are those of PyTorch's stable sorts, in fewer passes, since there are few experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS, PAIRS = 128, 16384  # of a program: keys, and pairs of a key and an expert that it compares, at most
PART = 1024  # blocks whose counts a program adds at a time, at most


@triton.jit
def rank_kernel(scores, experts, E: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr):
    """Write the indices of the CHOSEN largest scores of a row `[E]`, of equal ones the smaller first; what is not a
    number is the largest. EXPERTS: E, as a power of two."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    own = tl.load(scores + row * E + expert, expert < E, float("-inf"))
    # Numbers that are none differ from infinity by this addend alone.
    odd = (own != own).to(tl.int32)
    own = tl.where(odd > 0, float("inf"), own)
    larger = (own[None, :] > own[:, None]) | ((own[None, :] == own[:, None]) & (odd[None, :] > odd[:, None]))
    same = (own[None, :] == own[:, None]) & (odd[None, :] == odd[:, None])
    first = (larger | (same & (expert[None, :] < expert[:, None]))) & (expert < E)[None, :]
    rank = tl.sum(first.to(tl.int32), 1)
    tl.store(experts + row * CHOSEN + rank, expert.to(tl.int64), (rank < CHOSEN) & (expert < E))


@triton.jit
def count_kernel(keys, counts, M, blocks, E: tl.constexpr, EXPERTS: tl.constexpr, KEYS: tl.constexpr):
    """Write how many of a block's keys, int64 `[M]`, are each expert, to counts int32 `[E, blocks]`."""
    block = tl.program_id(0)
    at = block * KEYS + tl.arange(0, KEYS)
    own = tl.load(keys + at, at < M, E).to(tl.int32)
    expert = tl.arange(0, EXPERTS)
    total = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert * blocks + block, total, expert < E)


@triton.jit
def scan_kernel(counts, totals, blocks, PART: tl.constexpr):
    """Replace each of an expert's counts by the sum of those before it, and write that of all to totals `[E]`."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, blocks, PART):
        block = first + tl.arange(0, PART)
        own = tl.load(counts + expert * blocks + block, block < blocks, 0)
        tl.store(counts + expert * blocks + block, before + tl.cumsum(own, 0) - own, block < blocks)
        before += tl.sum(own, 0)
    tl.store(totals + expert, before)


@triton.jit
def place_kernel(keys, counts, totals, tokens, slots, places, ends, M, blocks, E: tl.constexpr,
                 CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Write where a block's keys are in the order of (key, index), and what is there. counts and totals: of
    `scan_kernel`."""
    block = tl.program_id(0)
    local = tl.arange(0, KEYS)
    at = block * KEYS + local
    own = tl.load(keys + at, at < M, 0).to(tl.int32)
    before = tl.load(counts + own * blocks + block)
    expert = tl.arange(0, EXPERTS)
    total = tl.load(totals + expert, expert < E, 0)
    end = tl.cumsum(total, 0)
    earlier = (own[None, :] == own[:, None]) & (local[None, :] < local[:, None])
    place = before + tl.gather(end - total, own, 0) + tl.sum(earlier.to(tl.int32), 1)
    place = place.to(tl.int64)
    tl.store(places + at, place, at < M)
    tl.store(slots + place, at.to(tl.int64), at < M)
    tl.store(tokens + place, (at // CHOSEN).to(tl.int64), at < M)
    if block == 0:
        tl.store(ends + expert, end, expert < E)


def power_of_two(count: int) -> int:
    return max(2, triton.next_power_of_2(count))


def ranked(scores: Tensor, count: int) -> Tensor:
    """Return the indices int64 `[.., count]` of the largest scores fp32 `[.., E]`."""
    scores, experts = scores.contiguous(), scores.shape[-1]
    found = torch.empty(*scores.shape[:-1], count, dtype=torch.int64, device=scores.device)
    size = power_of_two(experts)
    rank_kernel[(scores.numel() // experts,)](
        scores, found, E=experts, EXPERTS=size, CHOSEN=count, num_warps=max(1, min(16, size // 16))
    )
    return found


def sorted_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of an `Order` for experts int64 `[N, k]`, N > 0, of `count`."""
    experts, device = experts.contiguous(), experts.device
    total, chosen, width = experts.numel(), experts.shape[1], power_of_two(count)
    keys = min(KEYS, PAIRS // width)
    blocks, sizes = triton.cdiv(total, keys), {"E": count, "EXPERTS": width, "KEYS": keys}
    places, ends = torch.empty_like(experts), torch.empty(count, dtype=torch.int32, device=device)
    counts, totals = torch.empty(count * blocks, dtype=torch.int32, device=device), torch.empty_like(ends)
    count_kernel[(blocks,)](experts, counts, total, blocks, **sizes, num_warps=2)
    scan_kernel[(count,)](counts, totals, blocks, PART=min(power_of_two(blocks), PART))
    tokens, slots = (torch.empty(total, dtype=torch.int64, device=device) for _ in range(2))
    place_kernel[(blocks,)](
        experts, counts, totals, tokens, slots, places, ends, total, blocks, CHOSEN=chosen, **sizes, num_warps=2
    )
    return tokens, slots, places, ends
