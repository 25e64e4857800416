"""Collectives of large tensors that the GPUs' copy engines send, beside products that keep all multiprocessors.

A rank copies to the memory of the others what they are to have, and adds what came from them by a kernel that reads its
own memory alone. Fast path for ranks of one host whose GPUs reach each other's memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.collectives.layout import FLAG, aligned
from dtgpt.ops.fast import has_triton

ALIGNED = 16  # bytes


def meeting_bytes(ranks: int) -> int:
    """Return the bytes of memory that each rank needs for a `Meeting`, all of them zero at first."""
    return aligned(ranks * FLAG, ALIGNED)


def _row(source: int, target: int) -> int:
    """Return the place of what rank `source` sends among that of all ranks but `target`."""
    return source if source < target else source - 1


class Meeting:
    """A point on a stream that no rank passes before all have come to it. All ranks come to it equally often."""

    def __init__(self, flags: Sequence[Tensor], rank: int):
        """flags: `meeting_bytes` of each rank, as this rank reaches them."""
        self.ranks, self.rank, self._memory = len(flags), rank, flags[rank]
        device = self._memory.device
        self._addresses = torch.tensor([place.data_ptr() for place in flags], dtype=torch.int64, device=device)
        self._calls = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def run(self) -> None:
        """Queue it on the current stream."""
        from dtgpt.ops.collectives.push_kernels import launch_meet

        launch_meet(self._addresses, self._calls, self.rank, self.ranks)


def add_reference(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
    """Do as `add` does, in plain torch: the test oracle."""
    parts = [*others[:rank], own, *others[rank:]]
    out.copy_(sum(part.float() for part in parts))


def add(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
    """Set `out [n]` to the sum, in fp32 and in the order of the ranks, of this rank's `own [n]`, which may be `out`,
    and `others [ranks - 1, n]`, contiguous, those of the other ranks."""
    if has_triton(own):
        from dtgpt.ops.collectives.push_kernels import launch_add

        launch_add(own, others, out, rank)
    else:
        add_reference(own, others, out, rank)


class PushedSum:
    """The sum over the ranks of one flat tensor in memory that they share, in place."""

    @staticmethod
    def bytes(flat_bytes: int, ranks: int) -> int:
        """Return the bytes of memory that each rank needs for a tensor of `flat_bytes`, a multiple of ranks x
        ALIGNED."""
        return flat_bytes + flat_bytes // ranks * (ranks - 1)

    def __init__(self, memories: Sequence[Tensor], flat_bytes: int, dtype: torch.dtype, meeting: Meeting):
        """memories: the `bytes` of each rank, as this rank reaches them. meeting: of the stream on which sums run, one
        after the other, in the same order on all ranks."""
        ranks, mine = meeting.ranks, meeting.rank
        self._meeting = meeting
        self._flats = [memory[:flat_bytes].view(dtype).view(ranks, -1) for memory in memories]
        self._pieces = [memory[flat_bytes:].view(dtype).view(ranks - 1, -1) for memory in memories]
        self.flat, self.pieces = self._flats[mine].view(-1), self._pieces[mine]

    def run(self) -> None:
        """Queue the sum on the current stream.

        No rank overwrites what another one still reads: that one added the pieces of the call before, when it came to
        the second meeting of that call, and has used the sum of the call before, when it comes to the first of this.
        """
        mine, own = self._meeting.rank, self._flats[self._meeting.rank]
        for rank in self._meeting.others:
            self._pieces[rank][_row(mine, rank)].copy_(own[rank])
        self._meeting.run()
        add(own[mine], self.pieces, own[mine], mine)
        for rank in self._meeting.others:
            self._flats[rank][mine].copy_(own[mine])
        self._meeting.run()


class PushedGather:
    """An all-gather of several tensors into memory that the ranks share, in one turn."""

    def __init__(self, parts: Sequence[Tensor], places: Sequence[Sequence[Tensor]], meeting: Meeting):
        """parts: this rank's of each tensor. places: of each of these, its place in the memory of every rank,
        contiguous, as this rank reaches it; the own place may be the part itself, and may have a narrower type.
        meeting: of the stream on which all-gathers run."""
        self._meeting = meeting
        own = [place[meeting.rank] for place in places]
        self._sent = [(place[rank], mine) for rank in meeting.others for place, mine in zip(places, own, strict=True)]
        self._kept = [(mine, p) for mine, p in zip(own, parts, strict=True) if mine.data_ptr() != p.data_ptr()]

    def run(self) -> None:
        """Queue it on the current stream, after all that reads the places or writes the parts."""
        if self._kept:
            places, parts = zip(*self._kept, strict=True)
            torch._foreach_copy_(places, parts)
        self._meeting.run()
        for place, part in self._sent:
            place.copy_(part)
        self._meeting.run()


class PushedScatter:
    """Reduce-scatters through memory that the ranks share."""

    def __init__(self, memories: Sequence[Tensor], meeting: Meeting):
        """memories: uint8 of each rank, as this rank reaches them; larger tensors than fit take several turns. meeting:
        of the stream on which reduce-scatters run."""
        self._meeting, self._capacity = meeting, len(memories[0]) // (meeting.ranks - 1) // ALIGNED * ALIGNED
        self._memories = memories

    def run(self, whole: Tensor, part: Tensor) -> None:
        """Queue on the current stream: fill `part [n]` with this rank's part of the sum over the ranks, in fp32 and in
        their order, of the contiguous `whole [ranks n]`."""
        ranks, size = self._meeting.ranks, self._capacity // whole.itemsize
        for columns, out in zip(whole.view(ranks, -1).split(size, dim=1), part.split(size), strict=True):
            self._turn(columns, out)

    def _turn(self, whole: Tensor, part: Tensor) -> None:
        mine, size = self._meeting.rank, part.numel()
        areas = [
            memory.view(whole.dtype)[: (self._meeting.ranks - 1) * size].view(-1, size) for memory in self._memories
        ]
        self._meeting.run()  # by then the others have added what came before
        for rank in self._meeting.others:
            areas[rank][_row(mine, rank)].copy_(whole[rank])
        self._meeting.run()
        add(whole[mine], areas[mine], part, mine)
