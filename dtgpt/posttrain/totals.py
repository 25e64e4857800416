"""Sums beside the loss, for objectives whose records say more of an interval, such as how often an answer is preferred.

The head adds to them in each step, on the device, where a CUDA graph may hold it. Records have them over all samples of
the steps since the record before, and checkpoints keep them with the interval.
"""

from typing import Any

import torch
from torch import Tensor

from dtgpt.models.batch import Batch
from dtgpt.parallel.mesh import Mesh
from dtgpt.train.interval_loss import TOTALS, IntervalLoss
from dtgpt.train.objective import LanguageModel


class IntervalTotals(IntervalLoss):
    """The losses of an interval, and beside them the sums of the totals of its steps."""

    def __init__(self, mesh: Mesh, totals: Tensor):
        """totals: those of the newest step, fp64 `[K]`, the same on ranks of tp and cp."""
        super().__init__(mesh)
        self._copies_of_totals = mesh.plan.cp * mesh.plan.tp
        self._of_step, self._totals, self.num_totals = totals, torch.zeros_like(totals), len(totals)

    def add(self, loss: Tensor, empty: Tensor | None = None) -> None:
        super().add(loss, empty)
        self._totals.add_(self._of_step)

    def totals(self) -> list[float]:
        """Return the totals of the interval over all samples."""
        return [total / self._copies_of_totals for total in self._mesh.sum(*self._totals).tolist()]

    def restart(self) -> None:
        super().restart()
        self._totals.zero_()

    def state(self) -> dict[str, Any]:
        totals = self.totals()
        return super().state() | ({TOTALS: totals} if any(totals) else {})

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        if (found := (saved or {}).get(TOTALS)) and self._mesh.rank == 0:
            self._totals.copy_(torch.tensor(found, dtype=torch.float64) * self._copies_of_totals)


class TotalledModel(LanguageModel):
    """A language model whose loss sums more over the samples of a step: `totals`, fp64 `[K]`, the same on ranks of tp
    and cp, which `bind` sets. A captured step needs them at one address."""

    totals: Tensor

    def take(self, step: int) -> tuple[Batch, Tensor | None]:
        self.totals.zero_()  # outside of the graph that adds to them
        return super().take(step)

    def open_interval(self, mesh: Mesh) -> IntervalLoss:
        return IntervalTotals(mesh, self.totals)
