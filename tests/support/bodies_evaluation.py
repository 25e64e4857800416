"""What the tests of evaluation do as the ranks of a plan: importable by name."""

import numpy as np

from dtgpt.config.recipe import Recipe
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.command import command
from dtgpt.evaluation.scoring import Scorer, scorer_of
from dtgpt.train.setup import open_trainer
from tests.support.bodies_inference import load, sentence

Plain = list[tuple[np.ndarray, np.ndarray]]


def score(path, plan, samples: list[Sample], tokens: int) -> tuple[Plain, int]:
    """Scores, where rank 0 alone has the samples, and the number of samples that this rank heard of as finished."""
    model, done = load(path, plan), []
    found = scorer_of(model, tokens).score(samples if model.mesh.rank == 0 else None, done.append)
    assert found is not None
    return [tuple(one) for one in found], sum(done)


def refusal(path, plan, samples: list[Sample]) -> str:
    model = load(path, plan)
    return sentence(lambda: scorer_of(model).score(samples if model.mesh.rank == 0 else None))


def score_in_training(recipe: Recipe, samples: list[Sample], scoring: bool) -> tuple[list[Plain], list[float]]:
    """Scores of the training stages before the first and after each of two steps, and the losses of the steps."""
    with open_trainer(recipe) as run:
        found, losses = [], []

        def add() -> None:
            if scoring:
                given = run.stages, run.mesh, run.settings.model, run.settings.dtype, 40
                scores = Scorer(*given).score(samples)
                assert scores is not None
                found.append([tuple(one) for one in scores])

        add()
        for _ in range(2):
            losses.append(run.mean_loss(run.train_step()))
            add()
        return found, losses


def evaluate(words: list[str]) -> int:
    """The exit code of `dtgpt eval`."""
    return command(words)


def refused_evaluation(words: list[str]) -> str:
    return sentence(lambda: command(words))
