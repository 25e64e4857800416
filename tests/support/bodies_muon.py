"""What ranks do in tests of Muon."""

from operator import attrgetter
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.recipe import Recipe
from dtgpt.ops.random.philox import fold, normal, root_key
from dtgpt.planning.traffic import MATRICES_TRAVEL, collectives_of
from dtgpt.train.setup import open_trainer


def sent_by_muon(recipe: Recipe) -> tuple[int, float]:
    """Return the bytes of matrices that this rank sends to others in a step, and those of which `dtgpt plan` speaks."""
    sent, send = [0], dist.all_to_all_single

    def count(output, data, output_split_sizes, input_split_sizes, group, async_op):
        own = dist.get_rank(group)
        away = sum(size for rank, size in enumerate(input_split_sizes) if rank != own)
        sent[0] += away * data.element_size()
        return send(output, data, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

    with open_trainer(recipe) as trainer, mock.patch.object(dist, "all_to_all_single", count):
        trainer.train_step()
        found = collectives_of(trainer.settings, trainer.mesh.rank)
        return sent[0], sum(c.bytes for c in found if c.what == MATRICES_TRAVEL)


def drawn_gradient(name: str, step: int, region: tuple[range, ...]) -> Tensor:
    """Return a part of a gradient that is the same under every plan."""
    return normal(fold(fold(root_key(7), name), step), region).float()


def moved_by_muon(recipe: Recipe, steps: int) -> dict[str, Tensor | None]:
    """Take steps with gradients that are drawn. Return the weights, whole on rank 0."""
    with open_trainer(recipe) as trainer:
        for step in range(steps):
            gradients = [drawn_gradient(shard.name, step, shard.region) for shard in trainer.shards]
            trainer.optimizer.rule.step(gradients, torch.tensor(recipe.optimizer.lr), torch.tensor(0.5))
        return dict(gather_whole(trainer.shards, attrgetter("local")))
