"""What a checkpoint takes from a trainer, and gives to a trainer under any plan."""

from dataclasses import asdict
from typing import Any

from dtgpt.checkpoint.load import load_training
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.state import describe
from dtgpt.config.recipe import Recipe
from dtgpt.train.trainer import Trainer


def state_of(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """Return what `state.json` says of the steps that are done."""
    samples = trainer.samples_before(trainer.step)
    state = describe(asdict(recipe), trainer.settings, trainer.schedule, trainer.step, samples)
    return state | {"data_digest": trainer.dataset.digest, **trainer.optimizer.state()}


def restore(checkpoint: Checkpoint, recipe: Recipe, trainer: Trainer) -> None:
    """Load the weights, the moments and the step of a checkpoint of any plan."""
    state = checkpoint.state
    load_training(checkpoint, trainer.shards, trainer.optimizer.adamw)
    trainer.restore(state, recipe.batch_sizes(state["step"], state["consumed_samples"]))
