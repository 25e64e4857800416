"""Sums of large 16-bit tensors that the GPUs' copy engines send, beside products that keep all multiprocessors.

Each rank copies to the others their pieces, adds what came for its own piece in fp32, and copies the sum to the others.
Fast path for ranks of one host whose GPUs reach each other's memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16  # bytes
FLAG = 4  # bytes


def bytes_for(flat_bytes: int, ranks: int) -> int:
    """Return the bytes of memory that each rank needs, all of them zero at first, for the sum of a tensor of
    `flat_bytes`, a multiple of ranks x ALIGNED."""
    flags = 2 * ranks * FLAG
    return 2 * flat_bytes + -(-flags // ALIGNED) * ALIGNED


class PushedSum:
    """The sum over the ranks of one flat tensor in memory that they share, in place."""

    def __init__(self, memories: Sequence[Tensor], rank: int, flat_bytes: int, dtype: torch.dtype):
        """memories: of each rank the same `bytes_for` bytes, as this rank reaches them."""
        ranks, self.rank = len(memories), rank
        parts = [memory.split([flat_bytes, flat_bytes, memory.numel() - 2 * flat_bytes]) for memory in memories]
        self._flats = [flat.view(dtype) for flat, _, _ in parts]
        self._pieces = [pieces.view(dtype).view(ranks, -1) for _, pieces, _ in parts]
        self.flat, self.pieces = self._flats[rank], self._pieces[rank]
        addresses = [[flags.data_ptr() + phase * ranks * FLAG for _, _, flags in parts] for phase in range(2)]
        device = self.flat.device
        self._flags = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(2, 1, dtype=torch.int32, device=device)

    def run(self) -> None:
        """Queue the sum on the current stream. The ranks run their sums in the same order.

        No rank overwrites what another one still reads: that one added the pieces of the call before, when it came to
        the second meeting of that call, and has used the sum of the call before, when it comes to the first of this.
        """
        from dtgpt.ops.collectives.push_kernels import launch_add

        mine, others = self.rank, [rank for rank in range(len(self._flats)) if rank != self.rank]
        for rank in others:
            self._pieces[rank][mine].copy_(self._piece(mine, rank))
        self._meet(0)
        launch_add(self._piece(mine, mine), self._pieces[mine], mine)
        for rank in others:
            self._piece(rank, mine).copy_(self._piece(mine, mine))
        self._meet(1)

    def _piece(self, rank: int, index: int) -> Tensor:
        return self._flats[rank].view(len(self._flats), -1)[index]

    def _meet(self, phase: int) -> None:
        from dtgpt.ops.collectives.push_kernels import launch_meet

        launch_meet(self._flags[phase], self._calls[phase], self.rank, len(self._flats))
