"""What ranks do in tests that join parts of a run, each under a plan of its own, by checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.planning.memory import memory_of
from dtgpt.planning.parameters import parameters_of
from dtgpt.train.checkpoints import state_of
from dtgpt.train.setup import open_trainer


class Part(NamedTuple):
    """What a rank saw. held, planned: elements of each shard of weights, and bytes of the optimizer's state."""

    losses: list[float]
    weights: dict[str, Tensor | None]  # whole, on rank 0
    held: tuple[list[int], int]
    planned: tuple[list[int], int]


def train_part(recipe: Recipe, run: Path, last: int) -> Part:
    """Go on from the newest checkpoint of `run`, if there is one, to step `last`, and save."""
    from dtgpt.compare.whole_tensors import gather_whole

    checkpoints = run / "checkpoints"
    with open_trainer(recipe, run if checkpoints.exists() else None) as trainer:
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(last - trainer.step)]
        rule, rank = trainer.optimizer.rule, trainer.mesh.rank
        trainer.mesh.on_rank_0(lambda: checkpoints.mkdir(parents=True, exist_ok=True))
        with Saver(checkpoints, trainer.shards, rule) as saver:
            saver.save(trainer.step, state_of(trainer, asdict(recipe)), must=True)
        state = sum(tensor.nbytes for shard in trainer.shards for tensor in rule.state(shard.index).values())
        held = sorted(shard.local.numel() for shard in trainer.shards), state
        sizes = sorted(p.local for p in parameters_of(recipe.model, trainer.settings.plan, rank))
        planned = sizes, memory_of(trainer.settings, rank).optimizer
        return Part(losses, dict(gather_whole(trainer.shards, lambda shard: shard.local)), held, planned)
