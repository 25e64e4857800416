"""Sums of flat tensors over the ranks of a group by the GPUs' copy engines, in memory that the ranks share."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dtgpt.parallel.collectives import FlatSum
from dtgpt.parallel.narrow_sums.sums import NarrowSum
from dtgpt.parallel.shared_memory.arena import AllRanks, Area, share
from dtgpt.parallel.shared_memory.barrier import Barrier
from dtgpt.parallel.shared_memory.scatter import add, row_of


class CopySum(NarrowSum):
    """The same sum by copy engines and a kernel that adds, in memory that the ranks share."""

    @staticmethod
    def bytes(flat_bytes: int, ranks: int) -> int:
        """Return the bytes of the area for a tensor of `flat_bytes`, a multiple of ranks x ALIGNED."""
        return flat_bytes + flat_bytes // ranks * (ranks - 1)

    def __init__(self, area: Area, flat_bytes: int, dtype: torch.dtype, barrier: Barrier, group: dist.ProcessGroup):
        """area: of `bytes`. barrier: of the stream on which sums run, one after the other, in the same order on all
        ranks."""
        self._area, self._barrier = area, barrier
        self._flats = [memory[:flat_bytes].view(dtype).view(area.ranks, -1) for memory in area.of_ranks]
        self._pieces = [memory[flat_bytes:].view(dtype).view(area.ranks - 1, -1) for memory in area.of_ranks]
        super().__init__(self._flats[area.rank].view(-1), group, self._pieces[area.rank])

    def run(self) -> None:
        """Queue the sum on the current stream.

        No rank overwrites what another one still reads: that one added the pieces of the call before, when it came to
        the second barrier of that call, and has used the sum of the call before, when it comes to the first of this.
        """
        mine = self._area.rank
        own = self._flats[mine]
        for rank in self._area.others:
            self._pieces[rank][row_of(mine, rank)].copy_(own[rank])
        self._barrier.wait()
        add(own[mine], self.pieces, own[mine], mine)
        for rank in self._area.others:
            self._flats[rank][mine].copy_(own[mine])
        self._barrier.wait()


def open_sums(
    everyone: AllRanks, group: dist.ProcessGroup, wires: Sequence[tuple[torch.dtype, int]]
) -> Sequence[FlatSum] | None:
    """Return sums over the ranks of `group` for flat tensors of these 16-bit types and lengths, of `flat_length`; None
    where NCCL or gloo makes them. All ranks of the mesh take part."""
    sizes, ranks = [length * dtype.itemsize for dtype, length in wires], group.size()
    areas = share(everyone, group, [*(CopySum.bytes(size, ranks) for size in sizes), Barrier.bytes(ranks)])
    if areas is None:
        return None
    barrier = Barrier(areas.pop())
    return [
        CopySum(area, size, dtype, barrier, group) for area, size, (dtype, _) in zip(areas, sizes, wires, strict=True)
    ]
