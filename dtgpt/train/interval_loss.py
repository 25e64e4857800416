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

    totals: those of an `Objective`, which are summed beside the losses; None: it has none.
    """

    name = KEY

    def __init__(self, mesh: Mesh, totals: Tensor | None = None):
        self._mesh, self._copies = mesh, mesh.copies_of_loss
        self._copies_of_totals = mesh.plan.cp * mesh.plan.tp  # ranks that have the same ones in a step
        self._of_step, count = totals, 0 if totals is None else len(totals)
        self._sums = torch.zeros(1 + count, dtype=torch.float64, device=mesh.device)
        self._sum, self._totals = self._sums[0], self._sums[1:]  # views of it
        self._empty = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.steps = 0

    def add(self, loss: Tensor, empty: Tensor | None = None) -> None:
        """Add this rank's part of the loss of a step, and the totals as they are now. empty: bool scalar, whether no
        token of the step's batch counts; None: some do."""
        self._sum.add_(loss)
        if empty is not None:
            self._empty.add_(empty)
        if self._of_step is not None:
            self._totals.add_(self._of_step)
        self.steps += 1

    def totals(self) -> list[float]:
        """Return the totals of the interval over all samples; none where there are none."""
        if self._of_step is None:
            return []
        return [total / self._copies_of_totals for total in self._mesh.sum(*self._totals).tolist()]

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
        self._sums.zero_()
        self._empty.zero_()
        self.steps = 0

    def state(self) -> dict[str, Any]:
        totals, (total,) = self.totals(), self._mesh.sum(self._sum).tolist()
        own = {TOTALS: totals} if any(totals) else {}
        return {"sum": total, "copies": self._copies, "steps": self._with_loss, **own}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """None: of an older version, which did not keep the interval. Raises UserError where it has the totals of
        another objective."""
        if saved:
            total, copies = saved["sum"], saved["copies"]
            whole = total if copies == self._copies else total * self._copies / copies
            self._sum.fill_(whole if self._mesh.rank == 0 else 0.0)
            self._restore_totals(saved.get(TOTALS, []))
            self.steps = saved["steps"]

    def _restore_totals(self, found: list[float]) -> None:
        if found and len(found) != len(self._totals):
            raise UserError(
                f"the checkpoint has {counted(len(found), 'sum')} of an interval ({KEY}.{TOTALS}), and what this run "
                f"learns has {len(self._totals)}; go on with the values that the run began with, or begin a new run "
                "with --init_from"
            )
        if found and self._mesh.rank == 0:
            self._totals.copy_(torch.tensor(found, dtype=torch.float64) * self._copies_of_totals)


def check_finite(step: int, names: str, *values: float) -> None:
    """Raise UserError where the run has diverged. What a step does to the weights shows in the next step's loss."""
    if not all(math.isfinite(v) for v in values):
        shown = f"{'are' if values[1:] else 'is'} {' and '.join(f'{v:.4g}' for v in values)}"
        raise UserError(
            f"the run has diverged: {names} at step {step} {shown}; start again, or from an "
            "earlier checkpoint, with a lower optimizer.lr or a longer optimizer.warmup"
        )
