"""What the training loop asks of a plan: gradients of a batch, and logits."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.data.end_of_document import Marks
from dtgpt.model import GPTConfig
from dtgpt.parallel.mesh import Mesh, chunk

PLAIN = Marks()


class Passes(Protocol):
    def gradients(self, micro_batches: int, windows: Tensor, keys: Tensor | None, marks: Marks = PLAIN) -> Tensor:
        """Leave in the shards the gradient of the global batch, of which this replica has `micro_batches` equal pieces,
        times the `gradient_scale` of the output layer.

        windows: int64 `[B, T + 1]`; keys: int64 `[B, num_sites, 2]` or None; marks: of the tokens `[B, T]`. Returns the
        mean loss, detached: 0 on a rank that does not hold the head. The same tensor comes back with another value next
        time.
        """
        ...

    def expect(self, micro_batches: int) -> None:
        """Micro-batches of the steps to come, as many as at first or fewer; nothing is captured then."""
        ...

    def mean_loss(self, tokens: Tensor, targets: Tensor, marks: Marks = PLAIN) -> Tensor | None:
        """Without dropout or gradient: the mean loss of `targets [B, T]`, each times its weight, after `tokens [B, T]`,
        or None on a rank that does not hold the head."""
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
