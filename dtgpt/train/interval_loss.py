"""The mean training loss between two records, and whether a run has diverged."""

import math
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.loss.preference import FIGURES, figures_of
from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import is_finite

KEY = "interval_loss"  # in the state of a checkpoint


class IntervalLoss(StepState):
    """The losses of the steps since the last one that `log.interval` divides, summed on the device without waiting.
    A step without a token that counts has no loss.

    Each rank sums its part. fp64 holds sums of fp32 losses exactly, so that the mean does not depend on where a run
    was stopped and resumed in between. No captured step changes it: the loop adds a step's loss when that is done.
    """

    name = KEY

    def __init__(self, mesh: Mesh):
        self._mesh, self._copies = mesh, mesh.copies_of_loss
        self._copies_of_pairs = mesh.plan.cp * mesh.plan.tp  # ranks that have the same pairs in a step
        self._sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._totals = torch.zeros(len(FIGURES), dtype=torch.float64, device=mesh.device)
        self._empty = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.steps = 0

    def add(self, loss: Tensor, preferences: Tensor | None = None, empty: Tensor | None = None) -> None:
        """Add this rank's part of the loss of a step, and of the sums over its pairs, which are those of
        `PreferenceLoss.totals`. empty: as of `Trainer`."""
        self._sum.add_(loss)
        if empty is not None:
            self._empty.add_(empty)
        if preferences is not None:
            self._totals.add_(preferences)
        self.steps += 1

    def preferences(self) -> dict[str, float]:
        """Return what a record says of the pairs of the interval, over all ranks; nothing without pairs."""
        return figures_of(self._mesh.sum(*self._totals).tolist())

    def read(self, loss: Tensor, flag: bool, empty: Tensor | None = None) -> tuple[float | None, float | None, bool]:
        """Wait for the device, and return over all ranks: the loss of the last step, of which this rank's part is
        `loss`; the mean loss of a step of the interval; whether `flag` is up on any. A loss is None where no token
        counted; empty: as of `Trainer`."""
        total, interval, flags = self._mesh.sum(loss, self._sum, float(flag)).tolist()
        own = None if empty is not None and empty.item() else total / self._copies
        return own, interval / self._copies / self._with_loss if self._with_loss else None, flags > 0

    @property
    def _with_loss(self) -> int:
        """The number of steps in which a token counted."""
        return self.steps - int(self._empty.item())

    def restart(self) -> None:
        self._sum.zero_()
        self._totals.zero_()
        self._empty.zero_()
        self.steps = 0

    def state(self) -> dict[str, Any]:
        total, *preferences = self._mesh.sum(self._sum, *self._totals).tolist()
        own = {"preferences": [each / self._copies_of_pairs for each in preferences]} if any(preferences) else {}
        return {"sum": total, "copies": self._copies, "steps": self._with_loss, **own}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """None: of an older version, which did not keep the interval."""
        if saved:
            total, copies = saved["sum"], saved["copies"]
            whole = total if copies == self._copies else total * self._copies / copies
            self._sum.fill_(whole if self._mesh.rank == 0 else 0.0)
            if "preferences" in saved and self._mesh.rank == 0:
                self._totals.copy_(torch.tensor(saved["preferences"], dtype=torch.float64) * self._copies_of_pairs)
            self.steps = saved["steps"]


def check_interval(state: dict[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError where a checkpoint's state has an interval that `IntervalLoss.state` did
    not return."""
    if KEY in state:
        saved = state[KEY]
        counts = type(saved["steps"]) is type(saved["copies"]) is int and saved["steps"] >= 0 < saved["copies"]
        if not counts or not is_finite(saved["sum"]):
            raise ValueError(f"{KEY} needs a finite sum, and whole numbers of copies and steps")
        totals = saved.get("preferences", [0.0] * len(FIGURES))
        finite = [is_finite(total) for total in totals]
        if len(finite) != len(FIGURES) or not all(finite):
            raise ValueError(f"{KEY} needs {len(FIGURES)} finite sums over pairs")


def check_finite(step: int, names: str, *values: float) -> None:
    """Raise UserError where the run has diverged. What a step does to the weights shows in the next step's loss."""
    if not all(math.isfinite(v) for v in values):
        shown = f"{'are' if values[1:] else 'is'} {' and '.join(f'{v:.4g}' for v in values)}"
        raise UserError(
            f"the run has diverged: {names} at step {step} {shown}; start again, or from an "
            "earlier checkpoint, with a lower optimizer.lr or a longer optimizer.warmup"
        )
