"""What `fully_shard` gathers and scatters, sent by the GPUs' copy engines, where ranks share memory.

Its parameter groups take any object that allocates tensors and communicates: `set_custom_all_gather` and
`set_custom_reduce_scatter`.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.ops.collectives.pushes import Meeting, PushedGather, PushedScatter, aligned, meeting_bytes
from dtgpt.parallel.torch_private import SharedMemory

PLACES = 2  # for the weights of a block: a block is copied out while the next one comes
SCATTERED = 1 << 26  # bytes of gradients that come from the other ranks at once, at most


class Gather:
    """All-gathers of parameter groups into places of shared memory, which the groups use in turn."""

    def __init__(self, pushed: PushedGather, places: Sequence[int]):
        """places: bytes of each place. A group takes those of the smallest size that it fits into, in turn."""
        self._pushed, self._turns = pushed, 0
        self._places: dict[int, list[Tensor]] = {}
        for size, memory in zip(places, pushed.memory[: sum(places)].split(list(places)), strict=True):
            self._places.setdefault(size, []).append(memory)
        self._turn = dict.fromkeys(self._places, 0)
        self._given: dict[int, weakref.ref[Tensor]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor in the next place. Raises RuntimeError where it is still in use."""
        count = math.prod(size)
        fitting = min(bytes_ for bytes_ in self._places if bytes_ >= count * dtype.itemsize)
        places = self._places[fitting]
        memory = places[self._turn[fitting] % len(places)]
        self._turn[fitting] += 1
        before = self._given.get(memory.data_ptr())
        if before is not None and before() is not None:
            raise RuntimeError("fully_shard holds more all-gathered weights at once than there are places for")
        whole = memory[: count * dtype.itemsize].view(dtype)
        self._given[memory.data_ptr()] = weakref.ref(whole)
        return whole

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        """Fill `output_tensor`, of which `input_tensor` is this rank's part."""
        self._pushed.run(output_tensor)


class Scatter:
    """Reduce-scatters of the gradients of parameter groups."""

    def __init__(self, pushed: PushedScatter):
        self._pushed = pushed

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum over the ranks."""
        self._pushed.run(input_tensor, output_tensor)


def push_shards(
    groups: Iterable[int], itemsize: int, ranks: int, rank: int, share: Callable[[int], SharedMemory | None]
) -> tuple[Gather, Scatter] | None:
    """Return what gathers and scatters parameter groups of so many elements each, whole; the last one is that of the
    ends. None where the ranks do not share memory. share: as of `Buckets`."""
    *blocks, ends = (aligned(count * itemsize) for count in groups)
    places = [max(blocks, default=0)] * PLACES + [ends]
    room = aligned(min(SCATTERED, max(groups) * 4 // ranks * (ranks - 1)))
    sizes = [sum(places), room, meeting_bytes(ranks), meeting_bytes(ranks)]
    shared = share(sum(sizes))
    if shared is None:
        return None
    gathered, scattered, first, second = zip(*(memory.split(sizes) for memory in shared.of_ranks), strict=True)
    return Gather(PushedGather(gathered, Meeting(first, rank)), places), Scatter(PushedScatter(scattered, Meeting(second, rank)))
