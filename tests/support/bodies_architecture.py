"""What ranks do in test_architecture.py."""

import torch

from dtgpt.config.recipe import Recipe
from dtgpt.planning.parameters import parameters_of
from dtgpt.train.setup import open_trainer


def train_other(recipe: Recipe, steps: int) -> tuple[list[float], dict[str, torch.Tensor | None], list[int], list[int]]:
    """Return (losses, whole weights on rank 0, elements that this rank holds, elements that `dtgpt plan` says)."""
    with open_trainer(recipe) as trainer:
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(steps)]
        held = [shard.local.numel() for shard in trainer.shards]
        planned = [p.local for p in parameters_of(recipe.model, trainer.settings.plan, trainer.mesh.rank)]
        return losses, dict(trainer.shards.gather(lambda shard: shard.local)), held, planned
