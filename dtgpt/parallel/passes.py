"""What the training loop asks of a plan: gradients of a batch, and logits."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.model import GPTConfig
from dtgpt.parallel.mesh import Mesh, chunk

LossFunction = Callable[[Tensor, Tensor], Tensor]  # local logits [B, T, V_local], targets [B, T] -> mean loss


class Passes(Protocol):
    loss: LossFunction

    def gradients(self, micro_batches: int, windows: Tensor, keys: Tensor | None) -> Tensor:
        """Add the gradient of this replica's mean loss to the parameters, in `micro_batches` equal pieces.

        windows: int64 `[B, T + 1]`; keys: int64 `[B, num_sites, 2]` or None. Returns the mean loss, detached: 0 on a
        rank that does not hold the head.
        """
        ...

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Without dropout or gradient: this rank's columns of the logits `[B, T, V_local]` of `tokens [B, T]`, or None
        on a rank that does not hold the head."""
        ...


def whole_row(logits: Tensor | None, position: int, config: GPTConfig, mesh: Mesh) -> Tensor:
    """The logits `[V]` of one position, on every rank the same, from what `Passes.logits` left on the ranks."""
    if mesh.world == 1:
        return logits[0, position]
    row = torch.zeros(config.padded_vocab_size, device=mesh.device)
    if logits is not None and mesh.place.dp == 0:
        columns = chunk(range(len(row)), mesh.plan.tp, mesh.place.tp)
        row[columns.start : columns.stop] = logits[0, position].float()
    dist.all_reduce(row)  # everything else is zero, so that the sum is exact
    return row
