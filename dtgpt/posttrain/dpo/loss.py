"""The loss of preferences: direct preference optimization (DPO; Rafailov et al. 2023), with label smoothing (Mitchell
2023), and IPO (Azar et al. 2023) with the mean over the tokens of an answer, as TRL has it.

The loss couples the answers of a pair, but its gradient with respect to the log-probability of a token is a factor for
each answer. So the log-probabilities come first, without a gradient, then these factors, and then the head's usual loss
with the factors as weights of tokens: `dtgpt.ops.loss.head` makes the gradients as it always does.

Sharding rule: ranks of context parallelism each have some tokens of every sample. They gather the log-probabilities of
their parts of the answers, and each has the losses of whole pairs, and the factors of its own tokens.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtgpt.util.torch_private import all_gather_single

if TYPE_CHECKING:
    from dtgpt.models.shared.coupled import Coupled
    from dtgpt.posttrain.dpo.config import Kind

FIGURES = ("pairs", "accuracy", "chosen", "rejected")  # sums over pairs in `PreferenceLoss.totals`
UNLIKELY = 1000  # times less likely than before training: a fall of 6.9 nats


class Pairs(NamedTuple):
    """The pairs of a batch, in the order of `Coupled`: answer 2 i is chosen, answer 2 i + 1 is rejected in pair i of a
    sample."""

    weights: Tensor  # fp32 [B, P], factors of the losses; 0: the sample has fewer pairs
    answers: Tensor  # bool [B, T, 2 P]: the targets of each answer
    reference: Tensor | None  # fp64 [B, 2 P], log-probabilities before training; None: those of now are asked for


def pairs_of(about: "Coupled") -> Pairs:
    """Return what the head was given as pairs."""
    weights, answers, reference = about
    assert weights is not None and answers is not None
    return Pairs(weights, answers, reference)


def losses_and_slopes(
    chosen: Tensor, rejected: Tensor, kind: "Kind", beta: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, and its derivative by chosen - rejected. These are log-probabilities relative to
    the reference, of whole answers, or for `ipo` their means over tokens."""
    if kind == "ipo":
        distance = chosen - rejected - 1 / (2 * beta)
        return distance.square(), 2 * distance
    z, smooth = beta * (chosen - rejected), label_smoothing
    losses = -(1 - smooth) * F.logsigmoid(z) - smooth * F.logsigmoid(-z)
    return losses, beta * (smooth * torch.sigmoid(z) - (1 - smooth) * torch.sigmoid(-z))


class PreferenceLoss:
    """The mean loss of pairs. `totals` fp64 `[4]`: sums of FIGURES since they were set to zero: pairs, those whose
    chosen answer has the larger reward, and rewards, which are beta times relative log-probabilities.

    group: the ranks that have the other tokens of this rank's samples; None: it has all of them."""

    def __init__(
        self,
        kind: "Kind",
        beta: float,
        label_smoothing: float,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ):
        self.kind, self.beta, self.label_smoothing, self.group = kind, beta, label_smoothing, group
        self.totals = torch.zeros(len(FIGURES), dtype=torch.float64, device=device)

    def __call__(self, losses: Tensor, about: "Coupled") -> tuple[Tensor, Tensor] | Tensor:
        """Return the mean over all P of a batch of loss times weight, fp32, and the weights of tokens, fp32 `[B, T]`,
        by which the head's mean loss has its gradient; where pairs have no reference yet, the log-probabilities of
        answers, fp64 `[B, 2 P]`. losses: `[B, T]` of the targets."""
        weights, answers, reference = pairs_of(about)
        log_probabilities, counts = self.sums(losses, answers)
        if reference is None:
            return log_probabilities
        relative = log_probabilities - reference
        each, slopes = self.of_pairs(relative, counts)
        self._count(relative, weights > 0)
        # The head's mean is over this rank's targets, and gradients are the mean over the ranks of a sample: together
        # over the T of the whole sample, and not over P.
        length = losses.shape[1] * (1 if self.group is None else self.group.size())
        slopes = slopes * weights * (length / weights.shape[1])
        factors = torch.stack([-slopes, slopes], -1).flatten(1)
        if self.kind == "ipo":
            factors = factors / counts
        by_token = (answers * factors[:, None, :]).sum(-1)
        return (each * weights).mean().float(), by_token.float()

    def sums(self, losses: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the answers, and their numbers of tokens, 1 at least, both fp64 `[B, 2 P]`, from
        the losses of this rank's targets `[B, T]`. The order of the sums does not depend on what else is in the batch.
        """
        of_answer = answers.mT
        log_probabilities = -losses.double()[:, None, :].masked_fill(~of_answer, 0.0).sum(-1)
        own = torch.stack([log_probabilities, of_answer.sum(-1).double()])
        if self.group is not None:
            parts = own.new_empty(self.group.size() * len(own), *own.shape[1:])
            all_gather_single(parts, own, self.group)
            own = parts.unflatten(0, (-1, len(own))).sum(0)
        return own[0], own[1].clamp(min=1)

    def of_pairs(self, relative: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and slopes `[B, P]` of answers `[B, 2 P]`, which have `counts` tokens."""
        values = relative / counts if self.kind == "ipo" else relative
        return losses_and_slopes(values[:, 0::2], values[:, 1::2], self.kind, self.beta, self.label_smoothing)

    def figures(self, relative: Tensor, there: Tensor) -> Tensor:
        """Return the sums of FIGURES over the pairs that are there, bool `[B, P]`."""
        chosen, rejected = relative[:, 0::2], relative[:, 1::2]
        rows = [there, (chosen > rejected) & there, self.beta * chosen * there, self.beta * rejected * there]
        return torch.stack([row.double().sum() for row in rows])

    def caution(self, figures: dict[str, float]) -> str | None:
        """Return a warning where the chosen answers, too, became much less likely, which the loss does not show, and
        lost more than the margin has gained; None where not, or without pairs. figures: as of `figures_of`."""
        chosen, margin = figures.get("reward_chosen", 0.0), figures.get("reward_margin", 0.0)
        nats = -chosen / self.beta
        if nats < math.log(UNLIKELY) or -chosen < margin:
            return None
        return (
            f"the chosen answers are e^{nats:.1f} times less likely than before training (reward_chosen {chosen:.3f}), "
            f"more than the margin of {margin:.3f}; lower optimizer.lr, or raise dpo.beta"
        )

    def _count(self, relative: Tensor, there: Tensor) -> None:
        if torch.is_grad_enabled():
            self.totals.add_(self.figures(relative, there))


def figures_of(totals: list[float]) -> dict[str, float]:
    """Return what a record says of the sums of FIGURES: means over pairs; nothing where there were none."""
    pairs, accurate, chosen, rejected = dict(zip(FIGURES, totals, strict=True)).values()
    if not pairs:
        return {}
    return {
        "reward_accuracy": accurate / pairs,
        "reward_margin": (chosen - rejected) / pairs,
        "reward_chosen": chosen / pairs,
        "reward_rejected": rejected / pairs,
    }
