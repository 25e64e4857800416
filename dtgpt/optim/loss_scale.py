"""The dynamic loss scale of fp16 training (Micikevicius et al. 2018), by the rules of Megatron-LM.

fp16 ends at 65504 and loses what is below 6e-8, so the loss is multiplied by a scale that keeps gradients in between. A
step whose gradients overflow is skipped. The scale is halved where overflows outlast the hysteresis, and doubled after
`window` clean steps in a row, which also refill the hysteresis. Until then single overflows drain it, however
far apart they are.

All state is on the device and changes by tensor operations in place: nothing waits, and a CUDA graph may capture it.
Every rank holds its own copy; they stay equal because `overflow` is decided on the gradient of the whole batch, summed
over the world (`dtgpt.optim.update.SKIP_ABOVE`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from dtgpt.config.sections import LossScaleConfig

COUNTS = ("growth_tracker", "hysteresis_tracker", "skipped")


class LossScaler:
    """scale: fp32 scalar, to multiply the loss with. skipped: int64 scalar, how many steps were skipped."""

    def __init__(self, device: torch.device, config: LossScaleConfig):
        self.config = config
        self.scale = torch.tensor(config.initial, dtype=torch.float32, device=device)
        self.growth_tracker = torch.tensor(0, device=device)
        self.hysteresis_tracker = torch.tensor(config.hysteresis, device=device)
        self.skipped = torch.tensor(0, device=device)

    def inverse(self) -> Tensor:
        """Return the factor that undoes the scale in gradients, fp32 scalar."""
        return self.scale.reciprocal()

    @torch.no_grad()
    def update(self, overflow: Tensor, skip: Tensor, empty: Tensor | None = None) -> None:
        """Take note of a step. overflow: bool scalar on the device, true where the scale was too large. skip: the same,
        true where the step was skipped. empty: the same, true where it had no gradient, which says nothing of the
        scale."""
        clean = torch.where(overflow, 0, self.growth_tracker + (1 if empty is None else ~empty))
        left = self.hysteresis_tracker - overflow.long()
        grow, shrink = clean == self.config.window, overflow & (left <= 0)
        smaller = (self.scale / 2).clamp(min=self.config.minimum)
        self.scale.copy_(torch.where(shrink, smaller, torch.where(grow, self.scale * 2, self.scale)))
        self.growth_tracker.copy_(torch.where(grow, 0, clean))
        self.hysteresis_tracker.copy_(torch.where(grow, self.config.hysteresis, left))
        self.skipped += skip

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint; waits for the device."""
        return {"scale": self.scale.item(), **{name: getattr(self, name).item() for name in COUNTS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("scale", *COUNTS):
            getattr(self, name).fill_(state[name])


def check_state(state: Any) -> None:
    """Raise ValueError, TypeError or KeyError where `state` is neither None nor a `state_dict` of a scaler."""
    if state is None:
        return
    whole = all(type(state[name]) is int and abs(state[name]) < 1 << 62 for name in COUNTS)
    if type(state["scale"]) not in (int, float) or not 0 < state["scale"] < math.inf or not whole:
        raise ValueError("loss_scale needs a positive scale and whole counts")
