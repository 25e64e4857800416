"""What ranks do in tests of the balance of experts."""

from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.recipe import Recipe
from dtgpt.optim.balance.state import Balances
from dtgpt.train.setup import open_trainer


class Steps(NamedTuple):
    """What rank 0 saw: of each step its loss, figures and loads by layer; the gradients of the last one; the weights
    after it."""

    losses: list[float]
    figures: list[dict[str, float]]
    loads: list[list[list[float]]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def balance_of(trainer: Any) -> Balances:
    return next(state for state in trainer.optimizer.states if isinstance(state, Balances))


def balanced_steps(recipe: Recipe, held_out: bool = False) -> Steps:
    """Take the steps of a recipe. held_out: evaluate after each."""
    losses, figures, loads, gradients = [], [], [], {}
    with open_trainer(recipe) as trainer:
        for _ in range(recipe.num_steps):
            loss = trainer.gradients()
            gradients = dict(gather_whole(trainer.shards, trainer.gradient))
            losses.append(trainer.mean_loss(trainer.update(loss)))
            figures.append(balance_of(trainer).metrics())
            loads.append(balance_of(trainer).last[:, : balance_of(trainer).experts].tolist())
            if held_out:
                trainer.held_out_loss()
        return Steps(losses, figures, loads, gradients, dict(gather_whole(trainer.shards, attrgetter("local"))))
