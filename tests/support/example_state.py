"""An exponential mean of the loss, which each step leaves to the next: a capability in one file."""

import torch
from torch import Tensor

from dtgpt.optim.step_state import StepState
from dtgpt.util.field_types import is_finite
from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    step_states=("tests.support.example_state:make",),
    entries={"mean_loss": "tests.support.example_state:check_saved"},
)
KEPT = 0.75  # of the former mean


class MeanLoss(StepState):
    name = "mean_loss"

    def __init__(self, mesh):
        self.mesh, self.value = mesh, torch.zeros((), device=mesh.device)

    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> Tensor:
        """Of more than twice the mean is an outlier made, which leaves weights and mean as they are."""
        whole = self.mesh.sum(loss)[0].float() / self.mesh.copies_of_loss
        outlier = (self.value > 0) & (whole > 2 * self.value)
        moved = torch.where(self.value > 0, KEPT * self.value + (1 - KEPT) * whole, whole)
        self.value.copy_(torch.where(outlier, self.value, moved))
        return outlier

    def metrics(self) -> dict[str, float]:
        return {"mean_loss": self.value.item()}

    def state(self) -> float:
        return self.value.item()

    def restore(self, saved: float | None) -> None:
        self.value.fill_(saved or 0.0)


def make(recipe, settings, mesh) -> MeanLoss:
    return MeanLoss(mesh)


def check_saved(saved, config) -> None:
    if not is_finite(saved):
        raise ValueError("mean_loss must be a finite number")
