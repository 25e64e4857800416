"""Sums of 16-bit numbers over ranks that are rounded once."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.parallel.collectives import FlatSum
from dtgpt.util.torch_private import all_gather_single


class NarrowSum(FlatSum):
    """The sum of 16-bit numbers, whose count is a multiple of the number of ranks: half the bytes are sent. Each rank
    sums its piece in fp32 and rounds once, so that the error does not grow with the ranks, as it does where sums are
    passed on."""

    group: dist.ProcessGroup

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, pieces: Tensor | None = None):
        """pieces: memory for what comes from other ranks; None: new memory."""
        super().__init__(flat, group)
        self.pieces = torch.empty_like(flat) if pieces is None else pieces
        self._stream = second_stream(flat.device) if flat.is_cuda else None

    def begin(self) -> None:
        if self._stream is None:
            self.run()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.run()

    def run(self) -> None:
        """Queue the sum on the current stream."""
        dist.all_to_all_single(self.pieces, self.flat, group=self.group)
        own = self.pieces.view(self.group.size(), -1).sum(0, dtype=torch.float32).to(self.flat.dtype)
        all_gather_single(self.flat, own, self.group)

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@functools.cache
def second_stream(device: torch.device, purpose: str = "sums") -> torch.cuda.Stream:
    """Return the stream of all that has this purpose: PyTorch has few, and would in the end hand out the one that
    computes."""
    return torch.cuda.Stream(device)
