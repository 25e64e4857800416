"""What ranks do in tests/optim/test_optimizer_seam.py."""

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.planning.memory import memory_of
from dtgpt.train.checkpoints import state_of
from dtgpt.train.setup import open_trainer


def train_part(recipe: Recipe, run: Path, last: int) -> tuple[list[float], dict[str, Tensor | None], int, int]:
    """Go on from the newest checkpoint of `run`, if there is one, to step `last`, and save. Return (losses, whole
    weights on rank 0, bytes of the optimizer's state on this rank, those that `dtgpt plan` says)."""
    checkpoints = run / "checkpoints"
    with open_trainer(recipe, run if checkpoints.exists() else None) as trainer:
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(last - trainer.step)]
        rule = trainer.optimizer.rule
        with Saver(checkpoints, trainer.shards, rule) as saver:
            saver.save(trainer.step, state_of(trainer, asdict(recipe)), must=True)
        held = sum(tensor.nbytes for shard in trainer.shards for tensor in rule.state(shard.index).values())
        planned = memory_of(trainer.settings, trainer.mesh.rank).optimizer
        return losses, dict(trainer.shards.gather(lambda shard: shard.local)), held, planned
