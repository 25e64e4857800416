"""All-gather and reduce-scatter along any dimension by kernels that write to each other's memory.

They are for tensors of several MB, on which NCCL's are slower and which it gathers along the first dimension
alone. They compute a sum in fp32, in the order of the ranks.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory.arena import AllRanks, Area, share
from dtgpt.parallel.shared_memory.barrier import Barrier

PROGRAMS = 64  # of a kernel, while nothing else runs
WORD = 16  # bytes that a thread moves at once


class KernelCollectives:
    """The collectives of one rank with the others. All ranks make the same calls in the same order, on one stream."""

    def __init__(self, area: Area, barrier: Barrier, part_bytes: int):
        """area: of `area_bytes(part_bytes, ranks)`. part_bytes: of the largest part, a multiple of WORD. barrier: with
        the programs of each kernel, the same number on all ranks: multiprocessors that it takes from what else runs."""
        self.ranks, self.rank, self.part_bytes = area.ranks, area.rank, part_bytes
        self._area, self._barrier, self._addresses = area, barrier, area.addresses()

    def takes(self, whole: Sequence[int], dim: int | None, itemsize: int) -> bool:
        """Return whether tensors of the shape `whole` can be cut along `dim` into parts, None: flat, that fit into the
        area and consist of whole words."""
        shape, dim = ([math.prod(whole)], 0) if dim is None else (whole, dim)
        if shape[dim] % self.ranks:
            return False
        inner = math.prod(shape[dim:]) // self.ranks * itemsize
        return inner % WORD == 0 and 0 < math.prod(shape[:dim]) * inner <= self.part_bytes

    def gather(self, part: Tensor, dim: int | None) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim`; None: each rank has the whole, which is returned."""
        from dtgpt.parallel.shared_memory.kernels import launch_gather

        if dim is None:
            return part.view_as(part)
        shape = list(part.shape)
        shape[dim] *= self.ranks
        rows, whole = math.prod(part.shape[:dim]), part.new_empty(shape)
        unit = torch.int16 if part.itemsize == 1 else part.dtype  # bytes move in pairs
        own, all_parts = (tensor.flatten().view(unit) for tensor in (part.contiguous(), whole))
        launch_gather(own, all_parts, self._addresses, self._barrier, rows, self.part_bytes // unit.itemsize)
        return whole

    def sum(self, whole: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks; None: the whole sum."""
        from dtgpt.parallel.shared_memory.kernels import launch_sum

        if dim is None:
            return self.gather(self.sum(whole.flatten(), 0), 0).view(whole.shape)
        shape = list(whole.shape)
        shape[dim] //= self.ranks
        whole, part = whole.contiguous(), whole.new_empty(shape)
        launch_sum(whole, part, self._addresses, self._barrier, *self._size(part, dim))
        return part

    def _size(self, part: Tensor, dim: int) -> tuple[int, int]:
        return math.prod(part.shape[:dim]), self.part_bytes // part.itemsize


def area_bytes(part_bytes: int, ranks: int) -> int:
    """Return the bytes of the area for parts of up to `part_bytes`: a place for each rank's, twice."""
    return 2 * ranks * part_bytes


def open_collectives(settings: Settings, mesh: Mesh) -> KernelCollectives | None:
    """Return the collectives of tensor-parallel ranks for the activations of a micro-batch; None where NCCL or gloo
    runs them. All ranks of the mesh take part."""
    whole = settings.micro_batch_size * settings.local_length * settings.model.hidden_size * settings.dtype.itemsize
    return make_collectives(mesh, mesh.tp_group, whole, PROGRAMS)


def make_collectives(
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
