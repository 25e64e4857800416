"""All-gathers of several tensors at once that the GPUs' copy engines send, beside products that keep all
multiprocessors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.parallel.shared_memory.barrier import Barrier

PLACES = 3  # for the weights of blocks: `fully_shard` gathers one while the next one before it is still in use


class CopyGather:
    """An all-gather of several tensors into memory that the ranks share."""

    def __init__(self, parts: Sequence[Tensor], places: Sequence[Sequence[Tensor]], barrier: Barrier):
        """parts: this rank's of each tensor. places: for each of these, its place in the memory of every rank,
        contiguous; the own place may be the part itself, and may have a narrower type. barrier: of the stream on which
        all-gathers run."""
        self._barrier = barrier
        own = [place[barrier.rank] for place in places]
        others = [rank for rank in range(barrier.ranks) if rank != barrier.rank]
        self._sent = [(place[rank], mine) for rank in others for place, mine in zip(places, own, strict=True)]
        self._kept = [(mine, p) for mine, p in zip(own, parts, strict=True) if mine.data_ptr() != p.data_ptr()]

    def run(self) -> None:
        """Queue it on the current stream, after all that reads the places or writes the parts."""
        if self._kept:
            places, parts = zip(*self._kept, strict=True)
            torch._foreach_copy_(places, parts)
        self._barrier.wait()
        for place, part in self._sent:
            place.copy_(part)
        self._barrier.wait()
