"""All-gather and reduce-scatter along any dimension by kernels that write to each other's memory.

For tensors of several MB, on which NCCL's kernels are slower and which it gathers along the first dimension alone. A
sum is computed in fp32, in the order of the ranks.
"""

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dtgpt.comm.arena import AllRanks, Area, share
from dtgpt.comm.barrier import Barrier

WORD = 16  # bytes that a thread moves at once


class KernelCollectives:
    """The collectives of one rank with the others. All ranks make the same calls in the same order, on one stream."""

    def __init__(self, area: Area, barrier: Barrier, part_bytes: int):
        """area: of `area_bytes(part_bytes, ranks)`. part_bytes: of the largest part, a multiple of WORD. barrier: with
        the programs of each kernel, the same number on all ranks: multiprocessors that it takes from what else runs."""
        self.ranks, self.rank, self.part_bytes = area.ranks, area.rank, part_bytes
        self._area, self._barrier, self._addresses = area, barrier, area.addresses()

    def takes(self, part: Sequence[int], dim: int, itemsize: int) -> bool:
        """Return whether parts of the shape `part`, cut along `dim`, fit into the area and consist of whole words."""
        size, inner = math.prod(part) * itemsize, math.prod(part[dim:]) * itemsize
        return 0 < size <= self.part_bytes and inner % WORD == 0

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim`."""
        from dtgpt.comm.kernels import launch_gather

        shape = list(part.shape)
        shape[dim] *= self.ranks
        part, whole = part.contiguous(), part.new_empty(shape)
        launch_gather(part, whole, self._addresses, self._barrier, *self._size(part, dim))
        return whole

    def sum_part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim`, whose size is a multiple of the number of ranks, of the sum over the
        ranks."""
        from dtgpt.comm.kernels import launch_sum

        shape = list(whole.shape)
        shape[dim] //= self.ranks
        whole, part = whole.contiguous(), whole.new_empty(shape)
        launch_sum(whole, part, self._addresses, self._barrier, *self._size(part, dim))
        return part

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum over the ranks of tensors whose number of elements is a multiple of the number of ranks."""
        return self.gather(self.sum_part(whole.flatten(), 0), 0).view(whole.shape)

    def _size(self, part: Tensor, dim: int) -> tuple[int, int]:
        return math.prod(part.shape[:dim]), self.part_bytes // part.itemsize


def area_bytes(part_bytes: int, ranks: int) -> int:
    """Return the bytes of the area for parts of up to `part_bytes`: a place for each rank's, twice."""
    return 2 * ranks * part_bytes


def open_collectives(
    everyone: AllRanks, group: dist.ProcessGroup | None, whole: int, programs: int
) -> KernelCollectives | None:
    """Return collectives of the ranks of `group` for tensors of up to `whole` bytes, by kernels of so many programs;
    None where NCCL or gloo runs them. All ranks of the mesh take part."""
    if group is None:
        return None
    ranks = group.size()
    part = -(-whole // (ranks * WORD)) * WORD
    areas = share(everyone, group, [area_bytes(part, ranks), Barrier.bytes(ranks, programs)])
    return KernelCollectives(areas[0], Barrier(areas[1], programs), part) if areas else None
