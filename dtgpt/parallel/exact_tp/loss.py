"""The output projection and its loss, in pieces of the vocabulary.

As `dtgpt.ops.loss.head`, but that each piece of the vocabulary has logits of its own, and three terms of each row,
which all ranks get of all pieces: the sum of exponentials is a tree over the pieces, as is the gradient of the input.
Rows go through in chunks whose number does not depend on how many pieces a rank has.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtgpt.models.layers import LossWeights, Output
from dtgpt.ops.linear import linear
from dtgpt.ops.loss import cross_entropy as passes
from dtgpt.ops.loss.head import _add_product, chunk_rows
from dtgpt.parallel.exact_tp.products import operand, pieces_of
from dtgpt.parallel.exact_tp.tree import Share, tree_sum
from dtgpt.util.torch_private import is_dtensor


class PiecewiseLoss:
    """The mean loss of `dtgpt.models.layers.Output`, in the pieces of this rank."""

    def __init__(self, share: Share):
        self.share = share

    def __call__(
        self, output: Output, x: Tensor, weight: Tensor, bias: None, targets: Tensor, loss_weights: LossWeights
    ) -> Tensor:
        """Return the mean loss in nats, an fp32 scalar, equal on all ranks; x `[B, T, H]` is whole."""
        local = weight.to_local() if is_dtensor(weight) else weight
        factors = loss_weights.flatten() if isinstance(loss_weights, Tensor) else None
        rows = Rows(self.share, targets.flatten(), output.vocab_size, output.cap)
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return _Loss.apply(x.flatten(0, -2), local, rows, factors, output.bound.gradient_scale)
        losses = [rows.losses(part, logits) for part, logits in rows.chunks(x.flatten(0, -2), local)]
        return passes.weighted(torch.cat(losses), factors).mean()

    def log_probabilities(self, logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        """Return those of ids `[M]`, fp32, under this rank's logits `[M, V_local]`, as of the losses in training."""
        parts = [operand(part) for part in logits.chunk(self.share.number, 1)]
        return -Rows(self.share, ids.contiguous(), vocab_size, 0.0).losses(slice(None), parts)


class Rows:
    """The passes over the rows of a micro-batch."""

    def __init__(self, share: Share, targets: Tensor, vocab_size: int, cap: float):
        self.share, self.targets, self.vocab_size, self.cap = share, targets, vocab_size, cap
        self.largest = self.total = targets.new_empty(0)  # terms of the last chunk

    def chunks(self, x: Tensor, weight: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield (rows, their logits by piece), chunk by chunk."""
        share, count = self.share, len(x)
        columns = (
            len(weight) // share.number * (share.number if share.group is None else share.number * share.group.size())
        )
        size = chunk_rows(count, columns, x.element_size())
        weights = list(pieces_of(weight, share.number, 0))
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            part = operand(x[rows])
            yield rows, [linear(part, w, None) for w in weights]

    def places(self, logits: list[Tensor]) -> list[tuple[int, int]]:
        """Return (first column in the vocabulary, columns that are no padding) of each piece."""
        width = logits[0].shape[1]
        firsts = [(self.share.first + piece) * width for piece in range(self.share.number)]
        return [(first, passes.real_columns(width, self.vocab_size, first)) for first in firsts]

    def losses(self, rows: slice, logits: list[Tensor]) -> Tensor:
        """Return the losses `[rows]` of a chunk, and keep its terms."""
        places, targets = self.places(logits), self.targets[rows]
        own = [passes.row_terms(z, targets, *place, self.cap) for z, place in zip(logits, places, strict=True)]
        largest, total, target = self.share.gather(torch.stack(own)).unbind(1)  # [pieces, rows] each
        self.largest = largest.amax(0)
        self.total = tree_sum((total * torch.exp(largest - self.largest)).unbind())
        return passes.losses_of(self.largest, self.total, tree_sum(target.clone().unbind()))

    def to_gradient_(self, rows: slice, logits: list[Tensor], scale: Tensor) -> None:
        """Replace the logits of the chunk whose terms are kept by their gradient."""
        for z, place in zip(logits, self.places(logits), strict=True):
            passes.to_gradient_(z, self.targets[rows], self.largest, self.total, scale, *place, self.cap)


class _Loss(torch.autograd.Function):
    """The mean loss. Forward makes both gradients, while the logits of a chunk are there; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Rows, factors: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        count, pieces = len(x), rows.share.number
        scale = x.new_full((), 1 / count, dtype=torch.float32) if scale is None else scale.float() / count
        losses, dx = x.new_empty(count, dtype=torch.float32), torch.empty_like(x)
        weights = list(pieces_of(weight, pieces, 0))
        made: list[Tensor | None] = [None] * pieces
        for part, logits in rows.chunks(x, weight):
            losses[part] = rows.losses(part, logits)
            rows.to_gradient_(part, logits, scale if factors is None else scale * factors[part])
            dx[part] = tree_sum(z @ w for z, w in zip(logits, weights, strict=True))
            alone, own = part.stop - part.start == count, operand(x[part])
            for piece, z in enumerate(logits):
                made[piece] = _add_product(made[piece], z.t(), own, alone)
        dweight = torch.cat([each.to(weight.dtype) for each in made if each is not None])
        ctx.save_for_backward(dx, dweight)
        return passes.weighted(losses, factors).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *(passes.scaled(made, grad) for made in ctx.saved_tensors), None, None, None
