"""Sums over the ranks of a group whose addition is the caller's: each rank adds one piece, and all may get the sum."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.parallel.narrow_sums.sums import second_stream
from dtgpt.parallel.shared_memory.arena import AllRanks, share
from dtgpt.parallel.shared_memory.barrier import Barrier
from dtgpt.parallel.shared_memory.scatter import Add, CopyScatter
from dtgpt.util.torch_private import all_gather_single


class Pieces:
    """Sums on a stream beside the one that computes, by copy engines where the ranks share memory, else by NCCL or
    gloo. All ranks queue the same sums in the same order.

    sums: fp32 tensors that `gather` completes.
    """

    def __init__(self, everyone: AllRanks, group: dist.ProcessGroup | None, largest: int, lengths: Sequence[int] = ()):
        """everyone: all ranks, which take part. group: None of one rank. largest: bytes of the largest message to a
        rank. lengths: of the sums, multiples of the number of ranks."""
        self._group, self.ranks = group, 1 if group is None else group.size()
        self._stream = second_stream(everyone.device) if everyone.device.type == "cuda" else None
        self._kept: Sequence[Tensor] = ()
        self._queued = False
        self._scatter, self._barrier = None, None
        places = [4 * length for length in lengths]
        areas = share(everyone, group, [CopyScatter.bytes(largest, self.ranks), Barrier.bytes(self.ranks), *places])
        if areas is None:
            self.sums = [torch.zeros(length, device=everyone.device) for length in lengths]
            return
        arriving, flags, *areas = areas
        self._barrier = Barrier(flags)
        self._scatter = CopyScatter(arriving, self._barrier)
        self._of_ranks = [[memory.view(torch.float32) for memory in area.of_ranks] for area in areas]
        self.sums = [of_ranks[self._barrier.rank] for of_ranks in self._of_ranks]

    @property
    def rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def start(self, work: Callable[[], None], keep: Sequence[Tensor] = ()) -> None:
        """Queue what calls `scatter` and `gather`, after what the current stream has to do. keep: tensors of the
        current stream that it reads."""
        if self._kept:  # their memory is free for other kernels of the current stream
            self.wait()
        if self._stream is None:
            work()
            return
        self._kept, self._queued = keep, True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        """Hold the current stream until all is done."""
        if self._stream is not None and self._queued:  # else a graph that is captured may not know that stream yet
            torch.cuda.current_stream().wait_stream(self._stream)
        self._kept, self._queued = (), False

    def scatter(self, whole: Tensor, part: Tensor, add: Add) -> None:
        """Let `add` fill `part [n]` with this rank's part of the sum of the contiguous `whole [ranks k n]`. It gets the
        rows in any order."""
        if self._scatter is not None:
            self._scatter.run(whole, part, add)
            return
        rows = whole.view(self.ranks, -1)
        if self._group is not None:
            received = torch.empty_like(rows)
            dist.all_to_all_single(received, rows, group=self._group)
            rows = received
        add(rows[0], rows[1:], part, 0)

    def gather(self, index: int) -> None:
        """Give all ranks each other's parts of `sums[index]`."""
        own = self.sums[index].view(self.ranks, -1)[self.rank]
        if self._barrier is not None:
            for rank, whole in enumerate(self._of_ranks[index]):
                if rank != self.rank:
                    whole.view(self.ranks, -1)[self.rank].copy_(own)
            self._barrier.wait()
        elif self._group is not None:
            all_gather_single(self.sums[index], own.clone(), self._group)
