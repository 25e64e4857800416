"""What ranks do in tests that join parts of a run, each under a plan of its own, by checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.planning.parameters import Rank
from dtgpt.train.checkpoints import state_of
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer

Sizes = tuple[list[int], int]  # elements of each shard of weights, and bytes of the optimizer's state


class Part(NamedTuple):
    """What a rank saw."""

    losses: list[float]
    weights: dict[str, Tensor | None]  # whole, on rank 0
    held: Sizes
    planned: Sizes


def train_part(recipe: Recipe, run: Path, last: int) -> Part:
    """Go on from the newest checkpoint of `run`, if there is one, to step `last`, and save."""
    from dtgpt.compare.whole_tensors import gather_whole

    with open_trainer(recipe, begun(run)) as trainer:
        losses = [trainer.mean_loss(trainer.train_step()) for _ in range(last - trainer.step)]
        save(trainer, recipe, run)
        weights = dict(gather_whole(trainer.shards, lambda shard: shard.local))
        return Part(losses, weights, *held_and_planned(trainer))


def begun(run: Path) -> Path | None:
    """Return the run if it has a checkpoint."""
    return run if (run / "checkpoints").exists() else None


def save(trainer: Trainer, recipe: Recipe, run: Path) -> None:
    checkpoints = run / "checkpoints"
    trainer.mesh.on_rank_0(lambda: checkpoints.mkdir(parents=True, exist_ok=True))
    with Saver(checkpoints, trainer.shards, trainer.optimizer.rule) as saver:
        saver.save(trainer.step, state_of(trainer, asdict(recipe)), must=True)


def held_and_planned(trainer: Trainer) -> tuple[Sizes, Sizes]:
    rule, planned = trainer.optimizer.rule, Rank(trainer.settings, trainer.mesh.rank)
    state = sum(tensor.nbytes for shard in trainer.shards for tensor in rule.state(shard.index).values())
    sizes = sorted(p.local for p in planned.parameters)
    held = sorted(shard.local.numel() for shard in trainer.shards), state
    return held, (sizes, planned.optimizer_bytes)
