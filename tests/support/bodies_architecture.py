"""What ranks do in tests of architectures, and what their runs are held against."""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.planning.parameters import parameters_of
from dtgpt.train.setup import open_trainer


def train_other(recipe: Recipe, steps: int) -> tuple[list[float], dict[str, torch.Tensor | None], list[int], list[int]]:
    """Return (losses, whole weights on rank 0, elements that this rank holds, elements that `dtgpt plan` says)."""
    from dtgpt.compare.whole_tensors import gather_whole

    with open_trainer(recipe) as trainer:
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(steps)]
        held = [shard.local.numel() for shard in trainer.shards]
        planned = [p.local for p in parameters_of(recipe.model, trainer.settings.plan, trainer.mesh.rank)]
        return losses, dict(gather_whole(trainer.shards, lambda shard: shard.local)), held, planned


def one_process(steps: int, *fields: str) -> Callable[[Recipe], tuple[list[float], dict[str, Tensor | None]]]:
    """Return what gives the losses and weights of one process, trained once for all recipes with these fields alike."""
    found, key = {}, attrgetter(*fields)

    def of(recipe: Recipe) -> tuple[list[float], dict[str, Tensor | None]]:
        if key(recipe) not in found:
            found[key(recipe)] = train_other(recipe, steps)[:2]
        return found[key(recipe)]

    return of
