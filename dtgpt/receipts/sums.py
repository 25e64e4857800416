"""Digests of lists of tensors: on a GPU one Triton kernel reads each element once, elsewhere the definition answers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.receipts.digest import Piece, digest
from dtgpt.util.shared.gpu_limits import TRITON


class Digests:
    """Adds the digests of a list of tensors to their slots, those of one part or of all parts. Nothing waits for a GPU,
    and a CUDA graph may capture it."""

    def __init__(self, pieces: Sequence[Piece], parts: int, device: torch.device):
        self.pieces, self.parts, self.device = list(pieces), parts, device
        self.bytes_of_parts = [4 * sum(p.numel for p in pieces if p.part == part) for part in range(parts)]
        self.all = torch.tensor(parts, device=device)  # in place of the number of a part
        self._table = None
        if device.type == "cuda" and TRITON:
            from dtgpt.receipts.kernels import Table

            self._table = Table(self.pieces, parts, device)

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor], part: Tensor, sums: Tensor, row: Tensor) -> None:
        """Add to a row of `sums`, int64 `[rows, slots]`, the digests of the tensors, one for each piece. part, row:
        int64 scalars on the device."""
        if self._table is not None:
            self._table.add(tensors, part, sums, row)
            return
        # A CPU can be asked for the number of the part; of another device all digests are made, and those kept.
        known = int(part.item()) if self.device.type == "cpu" else None
        for piece, tensor in zip(self.pieces, tensors, strict=True):
            if known in (None, self.parts, piece.part):
                found = digest(tensor, piece)
                if known is None:
                    found = torch.where((part == self.parts) | (part == piece.part), found, 0)
                sums[:, piece.slot].index_add_(0, row.view(1), found.view(1))
