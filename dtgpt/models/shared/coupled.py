"""Losses that are another function of the losses of tokens than their mean, for objectives of capabilities.

The gradient of such a loss is that of a mean with weights. So the head makes the losses of tokens, the loss makes its
value and these weights of them, and the head makes the gradients as for any mean.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import LossWeights, Output
from dtgpt.ops.loss.head import InPlaceOf, head_loss, local_rows, rows_losses


class Coupled(NamedTuple):
    """What a `CoupledLoss` knows of the tokens beside their losses: fields of a batch."""

    weights: Tensor | None  # fp32 [B, N]: factors of the addends of the mean
    by_token: Tensor | None = None  # [B, T, ...]
    by_sample: Tensor | None = None  # [B, ...]


class CoupledLoss(Protocol):
    """A loss that is another function of the losses of tokens than their mean, such as one that holds answers against
    each other. Its gradient is that of a mean with weights, which it gives."""

    def __call__(self, losses: Tensor, about: Coupled) -> tuple[Tensor, Tensor] | Tensor:
        """Return (the loss, an fp32 scalar; d(T B loss) / d(losses), fp32 `[B, T]`), from the losses `[B, T]` of this
        rank's targets, which have no gradient; or, in evaluation alone, a tensor of another meaning. Under context
        parallelism a rank has `T / cp` of the tokens of a sample, and gradients are the mean over the cp ranks."""


def coupled_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    about: Coupled,
    coupled: CoupledLoss,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Return what `coupled` makes of the losses of tokens. Logits are made twice: for these losses, and for the
    gradients. The other arguments are those of `head_loss`."""
    with torch.no_grad():
        start, group, local, local_bias = local_rows(weight, bias, 0, None)
        place = (vocab_size, start, group)
        losses = rows_losses(x.flatten(0, -2), local, local_bias, targets.flatten(), *place, cap).view_as(targets)
    made = coupled(losses, about)  # where a gradient is wanted, so that it can tell a training step
    if isinstance(made, Tensor):
        return made
    value, weights = made
    loss = head_loss(x, weight, targets, vocab_size, scale=scale, weights=weights, bias=bias, cap=cap)
    return InPlaceOf.apply(loss, value, None)


class OutputLoss(NamedTuple):
    """A `CoupledLoss` as an output layer computes it."""

    coupled: CoupledLoss

    def __call__(
        self,
        head: Output,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        given: LossWeights,
    ) -> Tensor:
        scale, about = head.bound.gradient_scale, coupled_of(given)
        return coupled_loss(
            x, weight, targets, head.vocab_size, about, self.coupled, scale=scale, bias=bias, cap=head.cap
        )


def coupled_of(given: LossWeights) -> Coupled:
    """Return what a loss knows of the tokens, from what a head hands on to the output layer."""
    return Coupled(*given) if isinstance(given, tuple) else Coupled(given)


def set_loss(stages: Iterable[Decoder], coupled: CoupledLoss) -> None:
    """Let the output layer compute the loss by `coupled`, in place of the mean over tokens."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, Output):
            bind(module, loss=OutputLoss(coupled))
