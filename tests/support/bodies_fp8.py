"""Training in fp8 as the ranks of a plan: functions importable by name."""

from unittest import mock

import torch

from dtgpt.config.recipe import Recipe
from dtgpt.train import compare
from dtgpt.train.compare import Record
from dtgpt.train.startup import open_trainer


def record_with_history(recipe: Recipe, steps: int) -> tuple[Record | None, list[str], list[float]]:
    """Return what `dtgpt compare` records, and, on every rank, the history of the scales and the amaxes that are left
    after the last step."""
    with open_trainer(recipe) as trainer:
        made = compare.record(trainer, steps)
        assert trainer.fp8 is not None
        return made, trainer.fp8.state(), trainer.fp8.amax.tolist()


def record_with_fp32_activations(recipe: Recipe, steps: int) -> tuple[Record | None, list[str], list[float]]:
    """Return the same of a run whose products are of 8 bits and all else of fp32: two runs then differ by the values
    that rounding moves from one 8-bit number to the next, of which there are few."""
    with mock.patch("dtgpt.config.recipe.choose_dtype", lambda precision, device: torch.float32):
        return record_with_history(recipe, steps)
