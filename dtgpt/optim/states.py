"""Which states the steps of a run keep, and what a checkpoint may say of them."""

from typing import Any

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.models.config import ModelConfig
from dtgpt.optim import loss_scale
from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams

EMPTY = "empty_steps"  # in a checkpoint, and of a progress line


class EmptySteps(StepState):
    """How many steps had no token that counts. Such a step changes no weight."""

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


def make_states(recipe: Recipe, settings: Settings, mesh: Mesh) -> list[StepState]:
    """Return the states of a run. A capability has a function of these arguments for each of its own, which returns
    None where the recipe does not ask for the state."""
    added = (make(recipe, settings, mesh) for make in seams.listed("step_states"))
    states = [state for state in added if state is not None]
    states.append(EmptySteps(mesh.device))
    if settings.dtype == torch.float16:
        states.append(loss_scale.LossScaler(mesh.device, recipe.loss_scale))
    return states


def check_entries(entries: dict[str, Any], config: ModelConfig) -> None:
    """Raise ValueError, TypeError or KeyError where one of a checkpoint's entries is not what its state returned. They
    are checked also where the run that reads them has no such state."""
    count = entries.get(EMPTY, 0)
    if type(count) is not int or not 0 <= count < 1 << 62:
        raise ValueError(f"{EMPTY} must be a whole number")
    loss_scale.check_state(entries.get(loss_scale.NAME))
    for name, check in seams.added("entries").items():
        if name in entries:
            seams.load(check)(entries[name], config)
