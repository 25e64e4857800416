"""z-scores of the loss and of the gradient norm, and the updates that they skip, by the rules of llm.c's `-sl` and
`-sg`.

A step's score is its distance from the mean of the last WINDOW steps, itself included, in their standard deviations.
There are no scores until WINDOW steps have been seen. Steps that are skipped count in the window, too.

All state is on the device and changes by tensor operations in place: nothing waits, and a CUDA graph may capture it.
Every rank holds its own copy; they stay equal because loss and norm are summed over the world.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.models.config import ModelConfig
from dtgpt.optim.step_state import StepState
from dtgpt.optim.z_scores import OptimizerFields
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.field_types import is_finite

WINDOW = 128  # steps
STATE = "outliers"  # in a checkpoint


class OutlierDetector(StepState):
    """window: fp32 `[WINDOW, 2]`, (loss, gradient norm) of the last steps, the newest first. count: int64 scalar, how
    many rows of it are known. scores: fp64 `[2]` of the last step, NaN where there are none. skipped: int64 scalar, how
    many updates were skipped."""

    name = STATE

    def __init__(self, mesh: Mesh, config: OptimizerFields):
        self.mesh = mesh
        self.window = torch.zeros(WINDOW, 2, device=mesh.device)
        self.count = torch.tensor(0, device=mesh.device)
        self.scores = torch.full((2,), math.nan, dtype=torch.float64, device=mesh.device)
        self.skipped = torch.tensor(0, device=mesh.device)
        limits = [config.skip_loss_z or math.inf, config.skip_grad_norm_z or math.inf]
        self.limits = torch.tensor(limits, dtype=torch.float64, device=mesh.device)

    @torch.no_grad()
    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> Tensor:
        """Take note of a step, and return whether its update is to be skipped: bool scalar on the device, equal on all
        ranks. A step whose loss or norm is not finite stays out of the window, and has no score.

        loss: this rank's part of the mean loss; norm: of the global gradient. Fp32 scalars. empty: bool scalar, true
        where the step has no loss; it stays out of the window, too."""
        mean_loss = self.mesh.sum(loss)[0] / self.mesh.copies_of_loss
        values = torch.stack([mean_loss.float(), norm])
        known = values.isfinite().all() if empty is None else values.isfinite().all() & ~empty
        full = self.count == WINDOW
        self.window.copy_(torch.where(known, torch.cat([values[None], self.window[:-1]]), self.window))
        self.count.copy_((self.count + known).clamp(max=WINDOW))
        window = self.window.double()
        deviation = window.std(0, correction=0)
        distance = window[0] - window.mean(0)
        scores = torch.where(deviation > 0, distance / deviation, 0.0)
        self.scores.copy_(torch.where(known & full, scores, math.nan))
        skip = (self.scores > self.limits).any()
        self.skipped += skip
        return skip

    def metrics(self) -> dict[str, float]:
        """Return what a record adds: the scores of the last step, where there are any, and the updates skipped so far;
        waits for the device."""
        scores = dict(zip(("loss_z", "grad_norm_z"), self.scores.tolist(), strict=True))
        known = {name: score for name, score in scores.items() if math.isfinite(score)}
        return {**known, "skipped_outliers": int(self.skipped.item())}

    def state(self) -> dict[str, Any]:
        return {"window": self.window[: int(self.count.item())].tolist(), "skipped": self.skipped.item()}

    @torch.no_grad()
    def restore(self, saved: dict[str, Any] | None) -> None:
        """None: of a run that looked for no outliers. The window begins empty."""
        if saved is None:
            return
        rows = saved["window"]
        if rows:
            self.window[: len(rows)] = torch.tensor(rows)
        self.count.fill_(len(rows))
        self.skipped.fill_(saved["skipped"])


def check_state(state: Any, config: ModelConfig) -> None:
    """Raise ValueError, TypeError or KeyError where `state` is neither None nor the `state` of a detector."""
    if state is None:
        return
    rows, skipped = state["window"], state["skipped"]
    if type(rows) is not list or len(rows) > WINDOW or type(skipped) is not int or not 0 <= skipped < 1 << 62:
        raise ValueError(f"{STATE} needs a window of at most {WINDOW} steps, and a whole number of skipped updates")
    for row in rows:
        loss, norm = row
        if not all(is_finite(value) for value in (loss, norm)):
            raise ValueError(f"each step in the window of {STATE} needs a finite loss and norm")


def make_detector(recipe: Any, settings: Settings, mesh: Mesh) -> OutlierDetector | None:
    """Return what measures z-scores, where updates are skipped by them or they are shown; else None."""
    own = recipe.optimizer
    wanted = own.skip_loss_z or own.skip_grad_norm_z or "z" in recipe.log.show.split(",")
    return OutlierDetector(mesh, own) if wanted else None
