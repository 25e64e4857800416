"""What ranks do in test_cut_mlp.py: a step in fp8 as the plan runs it, and by hooks around modules, in 16 bits."""

from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.ops.fp8 import products
from dtgpt.parallel.collectives import GroupCollectives
from dtgpt.planning.traffic import collectives_of
from dtgpt.train.setup import open_trainer
from tests.support.bodies_fp8 import scales_of


class Found(NamedTuple):
    """A step by known scales, of one rank."""

    fused: int  # MLPs of forward passes
    sent: int  # bytes of what ranks gather of activations
    planned: int  # the same by `dtgpt plan`
    loss: float
    amaxes: list[float]
    gradients: dict[str, Tensor]  # of this rank's shards


def second_step(recipe: Recipe, by_modules: bool) -> Found:
    """The gradients of the first step after that which observes. by_modules: let hooks around the modules gather what
    is then quantised, and fuse no MLP."""
    sent = [0]

    def gather(self: GroupCollectives, part: Tensor, dim: int | None) -> Tensor:
        whole = original(self, part, dim)
        sent[0] += whole.nbytes if dim is not None else 0
        return whole

    original = GroupCollectives.gather
    with open_trainer(recipe) as trainer, ExitStack() as changes:
        scales = scales_of(trainer)
        trainer.train_step()
        if by_modules:
            changes.enter_context(mock.patch.object(products, "fused_name", lambda *of: None))
            changes.enter_context(mock.patch.object(products.Fp8Product, "exchanges", lambda product, bound: False))
        changes.enter_context(mock.patch.object(GroupCollectives, "gather", gather))
        fused = changes.enter_context(mock.patch.object(products, "fp8_mlp", wraps=products.fp8_mlp))
        loss = trainer.gradients()
        gradients = {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}
        settings, rank = trainer.settings, trainer.mesh.rank
        planned = sum(c.bytes for c in collectives_of(settings, rank) if (c.kind, c.over) == ("all-gather", "tp"))
        return Found(fused.call_count, sent[0], planned, loss.item(), scales.amax.tolist(), gradients)
