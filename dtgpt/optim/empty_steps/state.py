"""How many steps had no token that counts, which are skipped.

Such a step has no loss. Its gradients are zero, and the optimizer's rule would still move weights, by its momentum and
by weight decay.
"""

from typing import Any

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.models.config import ModelConfig
from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh

EMPTY = "empty_steps"  # in a checkpoint, and of a progress line


class EmptySteps(StepState):
    """The number of these steps, which is the same on all ranks."""

    name = EMPTY

    def __init__(self, device: torch.device):
        self.count = torch.tensor(0, device=device)

    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> Tensor | None:
        if empty is not None:
            self.count += empty
        return empty

    def metrics(self) -> dict[str, float]:
        return {EMPTY: count} if (count := self.state()) else {}

    def state(self) -> int | None:
        return int(self.count.item()) or None

    def restore(self, saved: int | None) -> None:
        self.count.fill_(saved or 0)


def make_counter(recipe: object, settings: Settings, mesh: Mesh) -> EmptySteps:
    """Return the state of a run: which data leave no token of a batch is known when the batch is made."""
    return EmptySteps(mesh.device)


def check_state(count: Any, config: ModelConfig) -> None:
    """Raise ValueError where this is not a number of steps."""
    if type(count) is not int or not 0 <= count < 1 << 62:
        raise ValueError(f"{EMPTY} must be a whole number")
