"""All-gather and reduce-scatter along any dimension: by NCCL or gloo, or by kernels that write to each other's memory.

The kernels are for tensors of several MB, on which NCCL's are slower and which it gathers along the first dimension
alone. They compute a sum in fp32, in the order of the ranks.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.comm.arena import AllRanks, Area, share
from dtgpt.comm.barrier import Barrier
from dtgpt.util.torch_private import all_gather_single, reduce_scatter_single

WORD = 16  # bytes that a thread moves at once


class GroupCollectives:
    """The collectives of a group by NCCL or gloo, for tensors that the ranks cut evenly.

    Functional collectives, which DTensor uses, must not gather in eager execution: gloo of torch 2.13 assigns the name
    of each finished collective to one string from two threads without a lock. Two threads that free the same long name,
    such as "ALLGATHER_COALESCED", corrupt the memory of the process. Names of up to 15 characters are not allocated,
    and those here are shorter.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def gather(self, part: Tensor, dim: int | None) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim`; None: each rank has the whole, which is returned."""
        if dim is None:
            return part.view_as(part)
        if part.itemsize == 1:  # neither gloo nor every NCCL knows 8-bit floats
            part, dtype = part.view(torch.uint8), part.dtype
            return self._concatenated(part, dim).view(dtype)
        return self._concatenated(part, dim)

    def _concatenated(self, part: Tensor, dim: int) -> Tensor:
        parts = part.new_empty(self.group.size() * len(part), *part.shape[1:])
        all_gather_single(parts, part.contiguous(), self.group)
        return torch.cat(parts.chunk(self.group.size()), dim)

    def sum(self, whole: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks; None: the whole sum, in place where `whole` is
        contiguous."""
        if dim is None:
            whole = whole.contiguous()
            dist.all_reduce(whole, group=self.group)
            return whole.view_as(whole)
        parts = torch.cat(whole.chunk(self.group.size(), dim))
        part = parts.new_empty(len(parts) // self.group.size(), *parts.shape[1:])
        reduce_scatter_single(part, parts, self.group)
        return part


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
        from dtgpt.comm.kernels import launch_gather

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
        from dtgpt.comm.kernels import launch_sum

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
