"""What ranks do in tests of the balance of experts."""

from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.recipe import Recipe
from dtgpt.optim.balance.state import Balances
from dtgpt.train.setup import open_trainer
from tests.support.bodies_optimizer import Sizes, begun, held_and_planned, save


class Steps(NamedTuple):
    """What a rank saw: of each step its loss, norm, figures and loads by layer, and on rank 0 the gradients; the
    weights after the last one. held, planned: as of `train_part`."""

    losses: list[float]
    norms: list[float]
    figures: list[dict[str, float]]
    loads: list[list[list[float]]]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    held: Sizes
    planned: Sizes


def balance_of(trainer: Any) -> Balances:
    return next(state for state in trainer.optimizer.states if isinstance(state, Balances))


def balanced_steps(recipe: Recipe, held_out: bool = False, run: Path | None = None, last: int | None = None) -> Steps:
    """Take the steps of a recipe. held_out: evaluate after each. run, last: go on from its newest checkpoint, if there
    is one, to this step, and save."""
    losses, norms, figures, loads, gradients = [], [], [], [], []
    with open_trainer(recipe, run and begun(run)) as trainer:
        for _ in range(trainer.step, last or recipe.num_steps):
            loss = trainer.gradients()
            gradients.append(dict(gather_whole(trainer.shards, trainer.gradient)))
            result = trainer.update(loss)
            losses.append(trainer.mean_loss(result))
            norms.append(result.norm.item())
            figures.append(balance_of(trainer).metrics())
            loads.append(balance_of(trainer).last[:, : balance_of(trainer).experts].tolist())
            if held_out:
                trainer.held_out_loss()
        if run:
            save(trainer, recipe, run)
        weights = dict(gather_whole(trainer.shards, attrgetter("local")))
        return Steps(losses, norms, figures, loads, gradients, weights, *held_and_planned(trainer))


def joined(first: Steps, then: Steps) -> Steps:
    """Return the steps of two parts of a run."""
    return Steps(*(getattr(first, name) + getattr(then, name) for name in Steps._fields[:5]), *then[5:])


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-12)).item()


def check_same(found: Steps, whole: Steps, exact: bool = False) -> None:
    assert found.losses == pytest.approx(whole.losses, rel=0 if exact else 1e-6)
    assert found.norms == pytest.approx(whole.norms, rel=0 if exact else 1e-5)
    assert found.loads == whole.loads
    for ours, theirs in zip(found.figures, whole.figures, strict=True):
        assert ours == (theirs if exact else pytest.approx(theirs, rel=2e-6))
    pairs = [*zip(found.gradients, whole.gradients, strict=True), (found.weights, whole.weights)]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if exact or "correction" in name:
                assert torch.equal(ours[name], value), name
            else:
                assert relative_error(ours[name], value) < 3e-5, name
