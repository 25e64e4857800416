"""The mean training loss between two records, and whether a run has diverged.

The loss of one step is noisy, so that a record has the mean of all since the record before. Reading each of them would
make the host wait for the device in every step: they are summed there, and read when a record is due.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

KEY = "interval_loss"  # in the state of a checkpoint
TOTALS = "preferences"  # in that: the sums of an objective, by the name of the first that had some


class IntervalLoss(StepState):
    """The losses of the steps since the last one that `log.interval` divides, summed on the device without waiting.
    A step without a token that counts has no loss.

    Each rank sums its part. fp64 holds sums of fp32 losses exactly, so that the mean does not depend on where a run
    was stopped and resumed in between. No captured step changes it: the loop adds a step's loss when that is done.

    """

    name = KEY
    num_totals = 0  # sums that a kind of it has beside that of the losses

    def __init__(self, mesh: Mesh):
        self._mesh, self._copies = mesh, mesh.copies_of_loss
        self._sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._empty = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.steps = 0

    def add(self, loss: Tensor, empty: Tensor | None = None) -> None:
        """Add this rank's part of the loss of a step. empty: bool scalar, whether no token of the step's batch counts;
        None: some do."""
        self._sum.add_(loss)
        if empty is not None:
            self._empty.add_(empty)
        self.steps += 1

    def read(self, loss: Tensor, flag: bool, empty: Tensor | None = None) -> tuple[float | None, float | None, bool]:
        """Wait for the device, and return over all ranks: the loss of the last step, of which this rank's part is
        `loss`; the mean loss of a step of the interval; whether `flag` is up on any. A loss is None where no token
        counted; empty: whether that is so in the last step."""
        total, interval, flags = self._mesh.sum(loss, self._sum, float(flag)).tolist()
        own = None if empty is not None and empty.item() else total / self._copies
        return own, interval / self._copies / self._with_loss if self._with_loss else None, flags > 0

    @property
    def _with_loss(self) -> int:
        """The number of steps in which a token counted."""
        return self.steps - int(self._empty.item())

    def restart(self) -> None:
        self._sum.zero_()
        self._empty.zero_()
        self.steps = 0

    def state(self) -> dict[str, Any]:
        (total,) = self._mesh.sum(self._sum).tolist()
        return {"sum": total, "copies": self._copies, "steps": self._with_loss}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """None: of an older version, which did not keep the interval. Raises UserError where it has the totals of
        another objective."""
        if saved:
            if (found := len(saved.get(TOTALS, []))) not in (0, self.num_totals):
                raise UserError(
                    f"the checkpoint has {counted(found, 'sum')} of an interval ({KEY}.{TOTALS}), and what this run "
                    f"learns has {self.num_totals}; go on with the values that the run began with, or begin a new run "
                    "with --init_from"
                )
            total, copies = saved["sum"], saved["copies"]
            whole = total if copies == self._copies else total * self._copies / copies
            self._sum.fill_(whole if self._mesh.rank == 0 else 0.0)
            self.steps = saved["steps"]


def check_finite(step: int, names: str, *values: float) -> None:
    """Raise UserError where the run has diverged. What a step does to the weights shows in the next step's loss."""
    if not all(math.isfinite(v) for v in values):
        shown = f"{'are' if values[1:] else 'is'} {' and '.join(f'{v:.4g}' for v in values)}"
        raise UserError(
            f"the run has diverged: {names} at step {step} {shown}; start again, or from an "
            "earlier checkpoint, with a lower optimizer.lr or a longer optimizer.warmup"
        )
