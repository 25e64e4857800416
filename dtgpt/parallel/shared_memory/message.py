"""Messages of one size that copy engines write into the memory of other ranks, while kernels keep all multiprocessors.

NCCL sends and receives by kernels: one that waits for a late peer takes multiprocessors from the products that run
meanwhile.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.parallel.shared_memory.arena import AllRanks, Area, aligned, share
from dtgpt.parallel.shared_memory.barrier import FLAG


class Messages:
    """Places in the memory of each rank, one for each message of a step, with a flag: 1 from when the message is there
    until its receiver waits for it. Signals have a flag and no place.

    A rank must not send to a place before its receiver has let it know, by a signal, that the place is free.
    """

    def __init__(self, flags: Area, places: Area, shape: Sequence[int], dtype: torch.dtype):
        """flags: int32, one for each message and then one for each signal. places: of `_place_bytes` for each message,
        whose shape and type are `shape` and `dtype`."""
        self._flags = [memory.view(torch.int32) for memory in flags.of_ranks]
        self._places = [memory.view(-1, _place_bytes(shape, dtype)) for memory in places.of_ranks]
        self._shape, self._dtype = tuple(shape), dtype
        self._rank, device = flags.rank, flags.own.device
        self._full = torch.ones(1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last: Tensor | None = None

    def send(self, message: Tensor, rank: int, index: int, after: int | None = None) -> None:
        """Copy a message to a place of another rank, after what is queued on the current stream and at the same time as
        what follows there. after: the signal to wait for before."""
        if self._last is not None:
            self.flush()  # it has long been sent, in general, and can be freed
        with self._own_stream():
            if after is not None:
                self._wait(after)
            self._tensor(rank, index).copy_(message)
            self._set(rank, index)
        self._last = message

    def signal(self, rank: int, index: int) -> None:
        """Set a flag of another rank, after what is queued on the current stream."""
        with self._own_stream():
            self._set(rank, index)

    def receive(self, index: int) -> Tensor:
        """Hold the current stream until message `index` to this rank is there. Returns it, at its place: each time
        another tensor, so that each can be a leaf of autograd's graph."""
        self._wait(index)
        return self._tensor(self._rank, index)

    def flush(self) -> None:
        """Hold the current stream until every message has been sent. There was one, or a signal, since what holds the
        stream is captured."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._last = None

    def _own_stream(self) -> torch.cuda.StreamContext:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _set(self, rank: int, index: int) -> None:
        self._flags[rank][index : index + 1].copy_(self._full)

    def _wait(self, index: int) -> None:
        from dtgpt.parallel.shared_memory.kernels import launch_wait

        launch_wait(self._flags[self._rank][index : index + 1])

    def _tensor(self, rank: int, index: int) -> Tensor:
        place = self._places[rank][index]
        start = place.storage_offset() // self._dtype.itemsize
        strides = torch.empty(self._shape, device="meta").stride()
        tensor = torch.empty(0, dtype=self._dtype, device=place.device)  # not a view of the memory
        return tensor.set_(place.untyped_storage(), start, self._shape, strides)


def _place_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return aligned(math.prod(shape) * dtype.itemsize)


def open_messages(
    everyone: AllRanks,
    group: dist.ProcessGroup | None,
    places: int,
    signals: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Messages | None:
    """Return what sends so many messages and signals to each rank of `group`; None where NCCL or gloo does. All
    ranks of the mesh take part."""
    areas = share(everyone, group, [(places + signals) * FLAG, places * _place_bytes(shape, dtype)])
    return Messages(areas[0], areas[1], shape, dtype) if areas else None
