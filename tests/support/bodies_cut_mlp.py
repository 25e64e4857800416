"""What ranks do in test_cut_mlp.py: MLPs in fp8 whose matrices a plan cuts, fused and by their modules."""

from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.models import layers
from dtgpt.train.startup import open_trainer


class Found(NamedTuple):
    """A step by known scales, of one rank."""

    fused: int  # MLPs of forward passes
    loss: float
    amaxes: list[float]
    gradients: dict[str, Tensor]  # of this rank's shards


def second_step(recipe: Recipe, by_modules: bool) -> Found:
    """The gradients of the first step after that which observes. by_modules: let no MLP be fused."""
    alone = mock.patch.object(layers, "fused_name", lambda *of: None) if by_modules else nullcontext()
    with open_trainer(recipe) as trainer, alone:
        assert trainer.fp8 is not None
        trainer.train_step()
        with mock.patch.object(layers, "fp8_mlp", wraps=layers.fp8_mlp) as fused:
            loss = trainer.gradients()
        gradients = {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}
        return Found(fused.call_count, loss.item(), trainer.fp8.amax.tolist(), gradients)
