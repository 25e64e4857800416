"""What ranks do in tests/posttrain/test_lora.py, with adapters or without."""

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.train.checkpoints import state_of
from dtgpt.train.setup import open_trainer


def train_and_save(recipe: Recipe, run: Path, last: int) -> tuple[list[float], dict[str, Tensor | None]]:
    """Go on from the newest checkpoint of `run`, if there is one, to step `last`, and save. Return (losses, what is
    trained, whole, on rank 0)."""
    checkpoints = run / "checkpoints"
    with open_trainer(recipe, run if checkpoints.exists() else None) as trainer:
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(last - trainer.step)]
        trainer.mesh.on_rank_0(lambda: checkpoints.mkdir(parents=True, exist_ok=True))
        with Saver(checkpoints, trainer.shards, trainer.optimizer.rule) as saver:
            saver.save(trainer.step, state_of(trainer, asdict(recipe)), must=True)
        return losses, dict(trainer.shards.gather(lambda shard: shard.local))
