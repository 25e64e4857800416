"""Messages of one size that copy engines write into the memory of other ranks, beside kernels that keep all
multiprocessors.

Fast path for ranks of one host whose GPUs reach each other's memory. NCCL sends and receives by kernels: one that waits
for a late peer takes multiprocessors from the products that run meanwhile.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.collectives.layout import FLAG, aligned

ALIGNED = 256  # bytes


def bytes_for(places: int, signals: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of memory that each rank needs, all of them zero at first, for so many messages and signals."""
    return aligned((places + signals) * FLAG, ALIGNED) + places * _place_bytes(shape, dtype)


class Messages:
    """Places in the memory of each rank, one for each message of a step, with a flag: 1 from when the message is there
    until its receiver waits for it. Behind these flags are those of signals, which have no place.

    A rank must not send to a place before its receiver has let it know, by a signal, that the place is free.
    """

    def __init__(
        self, memories: Sequence[Tensor], rank: int, places: int, signals: int, shape: Sequence[int], dtype: torch.dtype
    ):
        """memories: of each rank the same `bytes_for` bytes, as this rank reaches them; that of `rank` is its own."""
        start, size = aligned((places + signals) * FLAG, ALIGNED), _place_bytes(shape, dtype)
        self._flags = [memory[: (places + signals) * FLAG].view(torch.int32) for memory in memories]
        self._places = [memory[start:].view(places, size) for memory in memories]
        self._shape, self._dtype = tuple(shape), dtype
        self._rank, device = rank, memories[rank].device
        self._full = torch.ones(1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last: Tensor | None = None

    def send(self, message: Tensor, rank: int, index: int, after: int | None = None) -> None:
        """Copy a message to a place of another rank, behind what is queued on the current stream and beside what
        follows there. after: the signal to wait for before."""
        if self._last is not None:
            self.flush()  # it has long been sent, in general, and can be freed
        with self._beside():
            if after is not None:
                self._wait(after)
            self._tensor(rank, index).copy_(message)
            self._set(rank, index)
        self._last = message

    def signal(self, rank: int, index: int) -> None:
        """Set a flag of another rank, behind what is queued on the current stream."""
        with self._beside():
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

    def _beside(self) -> torch.cuda.StreamContext:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _set(self, rank: int, index: int) -> None:
        self._flags[rank][index : index + 1].copy_(self._full)

    def _wait(self, index: int) -> None:
        from dtgpt.ops.collectives.message_kernels import launch_wait

        launch_wait(self._flags[self._rank][index : index + 1])

    def _tensor(self, rank: int, index: int) -> Tensor:
        place = self._places[rank][index]
        start = place.storage_offset() // self._dtype.itemsize
        strides = torch.empty(self._shape, device="meta").stride()
        tensor = torch.empty(0, dtype=self._dtype, device=place.device)  # not a view of the memory
        return tensor.set_(place.untyped_storage(), start, self._shape, strides)


def _place_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return aligned(math.prod(shape) * dtype.itemsize, ALIGNED)
