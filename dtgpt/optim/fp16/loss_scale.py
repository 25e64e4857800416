"""The dynamic loss scale of fp16 training (Micikevicius et al. 2018), by the rules of Megatron-LM.

fp16 ends at 65504 and loses what is below 6e-8, so the loss is multiplied by a scale that keeps gradients in between. A
step whose gradients overflow is skipped. The scale is halved where overflows outlast the hysteresis, and doubled after
`window` clean steps in a row, which also refill the hysteresis. Until then single overflows drain it, however
far apart they are.

All state is on the device and changes by tensor operations in place: nothing waits, and a CUDA graph may capture it.
Every rank holds its own copy; they stay equal because `overflow` is decided on the gradient of the whole batch, summed
over the world.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.models.config import ModelConfig
from dtgpt.ops.optim.optimizer import norms_of
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.optim.step_state import GradientScale
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.util.errors import UserError

COUNTS = ("growth_tracker", "hysteresis_tracker", "skipped")

# Limits in fp16 for the largest element of the global gradient times the loss scale. The sum over the whole batch
# decides, so that every plan and micro-batch size skips the same steps.
# A step above SKIP_ABOVE is skipped. That is half of fp16's range: addends may be larger than their sum, and must not
# overflow before the sum does. A step above SHRINK_ABOVE is applied, and counts as an overflow for the loss scale: the
# scale falls before steps are lost, and rounding near this limit changes the scale alone, which changes no weight.
SKIP_ABOVE, SHRINK_ABOVE = 2.0**15, 2.0**13


class LossScaler(GradientScale):
    """scale: fp32 scalar, to multiply the loss with. skipped: int64 scalar, how many steps were skipped. at_smallest:
    bool scalar, whether the last step had the smallest scale."""

    name = "loss_scale"

    def __init__(self, device: torch.device, config: LossScaleConfig):
        self.config = config
        self.limits = torch.tensor([SKIP_ABOVE, SHRINK_ABOVE], device=device)
        self.scale = torch.tensor(config.initial, dtype=torch.float32, device=device)
        self.growth_tracker = torch.tensor(0, device=device)
        self.hysteresis_tracker = torch.tensor(config.hysteresis, device=device)
        self.skipped = torch.tensor(0, device=device)
        self.at_smallest = torch.tensor(False, device=device)

    def inverse(self) -> Tensor:
        return self.scale.reciprocal()

    def norm(self, shards: Shards) -> tuple[Tensor, Tensor]:
        inverse = self.inverse()
        excess = norms_of(shards.counted_gradients(), math.inf).max() > self.limits
        squares = shards.squares()
        counts = shards.mesh.all_reduce(torch.cat([squares, excess.to(squares.dtype)]))
        norm = shards.sums.root(counts[: len(squares)])
        # Over all ranks: whether an element of the global gradient is larger than a limit, or not finite.
        self._excess = (counts[len(squares) :] > 0) | ~norm.isfinite()
        return torch.where(self._excess[0], math.inf, norm * inverse), inverse

    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> Tensor:
        skip, overflow = self._excess  # of the same step
        self.at_smallest.copy_(self.scale <= self.config.minimum)
        self.follow(overflow, skip, empty)
        return skip

    @torch.no_grad()
    def follow(self, overflow: Tensor, skip: Tensor, empty: Tensor | None = None) -> None:
        """Set the scale of the next step. overflow: bool scalar on the device, true where that of this step was too
        large. skip: the same, true where the step is skipped. empty: the same, true where it had no gradient, which
        says nothing of the scale."""
        clean = torch.where(overflow, 0, self.growth_tracker + (1 if empty is None else ~empty))
        left = self.hysteresis_tracker - overflow.long()
        grow, shrink = clean == self.config.window, overflow & (left <= 0)
        smaller = (self.scale / 2).clamp(min=self.config.minimum)
        self.scale.copy_(torch.where(shrink, smaller, torch.where(grow, self.scale * 2, self.scale)))
        self.growth_tracker.copy_(torch.where(grow, 0, clean))
        self.hysteresis_tracker.copy_(torch.where(grow, self.config.hysteresis, left))
        self.skipped += skip

    def check(self, norm: float) -> None:
        if not math.isfinite(norm) and self.at_smallest.item():
            raise UserError(
                f"gradients overflow at the smallest loss scale, {self.config.minimum:g}; lower loss_scale.minimum or "
                "optimizer.lr, or use --precision bf16"
            )

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale.item(), "skipped_steps": int(self.skipped.item())}

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale.item(), **{name: getattr(self, name).item() for name in COUNTS}}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """None: of a run in another precision. The scale begins anew."""
        if saved is not None:
            for name in ("scale", *COUNTS):
                getattr(self, name).fill_(saved[name])


def make_scaler(recipe: Recipe, settings: Settings, mesh: Mesh) -> LossScaler:
    """Return the loss scale of a run, as its recipe has it."""
    return LossScaler(mesh.device, recipe.section(LossScaleConfig))


def check_state(state: Any, config: ModelConfig | None = None) -> None:
    """Raise ValueError, TypeError or KeyError where `state` is neither None nor the `state` of a scaler, whatever the
    model's config is."""
    if state is None:
        return
    whole = all(type(state[name]) is int and abs(state[name]) < 1 << 62 for name in COUNTS)
    if type(state["scale"]) not in (int, float) or not 0 < state["scale"] < math.inf or not whole:
        raise ValueError("loss_scale needs a positive scale and whole counts")
