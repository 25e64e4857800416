"""What ranks do in tests of adapters."""

from pathlib import Path

from torch import Tensor

from dtgpt.config.recipe import Recipe
from tests.support.bodies_optimizer import train_part


def train_and_save(recipe: Recipe, run: Path, last: int) -> tuple[list[float], dict[str, Tensor | None]]:
    """Train a part of a run. Return (losses, what is trained, whole, on rank 0)."""
    return train_part(recipe, run, last)[:2]
