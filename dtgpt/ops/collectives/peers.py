"""All-gather and reduce-scatter along any dimension by kernels that write to each other's memory.

Fast path for ranks of one host whose GPUs reach each other's memory, for tensors of several MB, on which NCCL's kernels
are slower and which it gathers along the first dimension alone. A sum is computed in fp32, in the order of the ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.collectives.layout import FLAG

WORD = 16  # bytes that a thread moves at once


class Peers:
    """The collectives of one rank with the others. All ranks make the same calls in the same order, on one stream."""

    def __init__(self, addresses: Sequence[int], rank: int, memory: Tensor, part_bytes: int, programs: int):
        """addresses: of each rank's `bytes_for` bytes, for this rank. memory: what holds this rank's. programs: of each
        kernel, the same on all ranks: multiprocessors that it takes from what else runs."""
        self.ranks, self.rank, self.part_bytes, self._memory = len(addresses), rank, part_bytes, memory
        flags = [address + 2 * self.ranks * part_bytes for address in addresses]
        self._addresses = torch.tensor([*addresses, *flags], dtype=torch.int64, device=memory.device)
        self._calls = torch.zeros(programs, dtype=torch.int32, device=memory.device)

    def takes(self, part: Sequence[int], dim: int, itemsize: int) -> bool:
        """Return whether parts of this shape, cut along `dim`, fit into the memory and consist of whole words."""
        size, inner = math.prod(part) * itemsize, math.prod(part[dim:]) * itemsize
        return 0 < size <= self.part_bytes and inner % WORD == 0

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, one behind the other along `dim`."""
        from dtgpt.ops.collectives.peer_kernels import launch_gather

        shape = list(part.shape)
        shape[dim] *= self.ranks
        part, whole = part.contiguous(), part.new_empty(shape)
        launch_gather(part, whole, *self._arguments(part, dim))
        return whole

    def sum_part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim`, which the number of ranks divides, of the sum over the ranks."""
        from dtgpt.ops.collectives.peer_kernels import launch_sum

        shape = list(whole.shape)
        shape[dim] //= self.ranks
        whole, part = whole.contiguous(), whole.new_empty(shape)
        launch_sum(whole, part, *self._arguments(part, dim))
        return part

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum over the ranks, whose number divides that of the elements."""
        return self.gather(self.sum_part(whole.flatten(), 0), 0).view(whole.shape)

    def _arguments(self, part: Tensor, dim: int) -> tuple[Tensor, Tensor, int, int, int, int]:
        rows, capacity = math.prod(part.shape[:dim]), self.part_bytes // part.itemsize
        return self._addresses, self._calls, rows, capacity, self.rank, self.ranks


def bytes_for(part_bytes: int, ranks: int, programs: int) -> int:
    """Return the bytes of memory that each rank needs, all of them zero at first, for parts of up to `part_bytes`, a
    multiple of WORD."""
    return ranks * (2 * part_bytes + programs * FLAG)
