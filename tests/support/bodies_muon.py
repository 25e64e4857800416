"""What ranks do in tests/optim/muon/test_muon.py."""

from unittest import mock

import torch.distributed as dist

from dtgpt.config.recipe import Recipe
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
