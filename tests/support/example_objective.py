"""An objective that no file of dtgpt names: smoothed labels, and a loss that weighs tokens by how unlikely they
are (Lin et al. 2017).

A share of the targets is drawn anew, uniformly, by key and number of the sample, so that the mean loss is that of
smoothed labels under every plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.capabilities import CAPABILITIES
from dtgpt.config.recipe import Recipe
from dtgpt.models.batch import Batch
from dtgpt.models.shared.coupled import Coupled, set_loss
from dtgpt.ops.random.philox import fold
from dtgpt.posttrain.totals import IntervalTotals, TotalledModel
from dtgpt.train.objective import Parts
from dtgpt.train.setup import open_trainer
from dtgpt.util import seams
from dtgpt.util.field_types import Bounds
from dtgpt.util.seams import Capability

CAPABILITY = Capability(objectives={"smoothing.share": f"{__name__}:SmoothedLabels"})


@dataclass(frozen=True, kw_only=True)
class SmoothingConfig:
    share: Annotated[float, "share of labels that are drawn", Bounds(0, below=1)] = 0.0


@dataclass(frozen=True, kw_only=True)
class SmoothingRecipe(Recipe):
    smoothing: SmoothingConfig = field(default_factory=SmoothingConfig)


class FocalLoss:
    """The mean of l (1 - p), where l = -log p. `totals`: tokens, and the sum of p."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self.totals, self.group = torch.zeros(2, dtype=torch.float64, device=device), group

    def __call__(self, losses: Tensor, about: Coupled) -> tuple[Tensor, Tensor]:
        p = torch.exp(-losses)
        if torch.is_grad_enabled():  # in a training step
            own = torch.stack([torch.ones_like(p), p]).double().sum((1, 2))
            if self.group is not None:
                dist.all_reduce(own, group=self.group)
            self.totals.add_(own)
        return (losses * (1 - p)).mean(), 1 - p + losses * p


class SmoothedLabels(TotalledModel):
    def bind(self, parts: Parts) -> None:
        super().bind(parts)
        loss = FocalLoss(parts.mesh.device, parts.mesh.cp_group)
        self.totals = loss.totals
        set_loss(parts.stages, loss)

    def add(self, batch: Batch, windows: Tensor, sample_ids: Tensor, *more: Tensor) -> Batch:
        assert batch.targets is not None
        vocab_size = self.parts.settings.model.vocab_size
        places = torch.arange(batch.targets.shape[1], device=windows.device)
        drawn = fold(fold(self.data_key, sample_ids)[:, None], places)
        anew = drawn[..., 0] < self.given.section.share * 2**32
        return batch._replace(targets=torch.where(anew, drawn[..., 1] % vocab_size, batch.targets))

    def state(self, step: int) -> dict[str, Any]:
        return {"smoothed_steps": step}

    def figures(self, interval: IntervalTotals) -> dict[str, float]:
        totals = interval.totals()
        return {"confidence": totals[1] / totals[0], "counted_tokens": totals[0]}

    def examples(self) -> dict[str, str]:
        return {"share": f"{self.given.section.share:g}\n"}


@contextmanager
def in_use() -> Iterator[None]:
    """Let the core have this capability, too."""
    others = [module for module, _ in CAPABILITIES]
    seams.use([*others, __name__])
    try:
        yield
    finally:
        seams.use(others)


def train_smoothed(recipe: Recipe, steps: int) -> tuple[list[float], float, list[float]]:
    """Return the losses of some steps, that of validation after them, and the totals of the last step over all
    samples."""
    with in_use(), open_trainer(recipe) as trainer:
        assert type(trainer.objective) is SmoothedLabels
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(steps)]
        copies = trainer.mesh.plan.tp * trainer.mesh.plan.cp
        totals = [total / copies for total in trainer.mesh.sum(*trainer.objective.totals).tolist()]
        return losses, trainer.held_out_loss()[0], totals
