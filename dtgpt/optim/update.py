"""From gradients to new weights: learning rate, loss scale, clipping, the optimizer's rule."""

import math
from typing import Any

import torch
from torch import Tensor

from dtgpt.config.sections import LossScaleConfig, OptimizerConfig
from dtgpt.optim.fp8_scales import STATE, Fp8Scales
from dtgpt.optim.loss_scale import LossScaler
from dtgpt.optim.outliers import STATE as OUTLIERS
from dtgpt.optim.outliers import OutlierDetector
from dtgpt.parallel.shards import Shards
from dtgpt.util.errors import UserError

EMPTY = "empty_steps"  # in a checkpoint, and of a progress line

# Limits in fp16 for the largest element of the global gradient times the loss scale. The sum over the whole batch
# decides, so that every plan and micro-batch size skips the same steps.
# A step above SKIP_ABOVE is skipped. That is half of fp16's range: addends may be larger than their sum, and must not
# overflow before the sum does. A step above SHRINK_ABOVE is applied, and counts as an overflow for the loss scale: the
# scale falls before steps are lost, and rounding near this limit changes the scale alone, which changes no weight.
SKIP_ABOVE, SHRINK_ABOVE = 2.0**15, 2.0**13


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that brings gradients of this global `norm` down to at most `limit` (0: no limit), fp32 on the
    device."""
    if limit == 0:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


class Update:
    """From the gradients of the shards to new weights: loss scale, clipping, and the optimizer's
    `rule`. Nothing waits for the device.

    `schedule`, the learning rate of every update, lies on the device, for only the device knows how many steps fp16
    skipped: such a step does not count (as in Megatron-LM). `lr` is that of the last step. `gradient_scale` is what the
    gradient of a micro-batch's mean loss is to be multiplied by.
    """

    def __init__(
        self, shards: Shards, config: OptimizerConfig, scale: LossScaleConfig, rates: list[float], dtype: torch.dtype,
        micro_batch_weight: float, fp8: Fp8Scales | None = None, outliers: OutlierDetector | None = None,
    ):  # fmt: skip
        """rates: learning rates of every step; micro_batch_weight: by which the gradients of one
        micro-batch are multiplied in the sum over all."""
        self.shards, self.clip, self.fp8, self.outliers = shards, config.clip, fp8, outliers
        device = shards.mesh.device
        self.smallest_scale, self.at_smallest = scale.minimum, torch.tensor(False, device=device)
        self.rule = config.make(shards)
        self.schedule = torch.tensor(rates, device=device)
        self.lr = torch.zeros((), device=device)
        self.empty = torch.tensor(0, device=device)  # steps in which no token counted
        self.gradient_scale = torch.empty((), device=device)
        self.scaler = None
        if dtype == torch.float16:
            self.limits = torch.tensor([SKIP_ABOVE, SHRINK_ABOVE], device=device)
            self.scaler = LossScaler(device, scale)
        self.weigh_micro_batches(micro_batch_weight)

    def weigh_micro_batches(self, weight: float) -> None:
        """Multiply the gradients of each micro-batch by `weight` in the sum over all."""
        self.micro_batch_weight = weight
        self.gradient_scale.fill_(weight)
        if self.scaler is not None:
            self.gradient_scale.mul_(self.scaler.scale)

    def inverse_scale(self) -> Tensor | float:
        """Return the factor that undoes the loss scale in the present gradients."""
        return 1.0 if self.scaler is None else self.scaler.inverse()

    @torch.no_grad()
    def apply(self, loss: Tensor, empty: Tensor | None = None) -> Tensor:
        """Take one step and return the global norm of the gradient. In fp16 a step whose gradient overflows is skipped
        on all ranks, and its norm is infinite. loss: this rank's part of the mean loss, by which outliers are found.
        empty: bool scalar on the device, the same on all ranks, true where no token of the global batch counts; None:
        all do. Such a step changes neither weights nor the optimizer's state, and the schedule does not go on."""
        update = self.rule.updates.long().clamp(max=len(self.schedule) - 1)
        torch.index_select(self.schedule, 0, update.view(1), out=self.lr.view(1))
        if self.fp8 is not None:
            self.fp8.update()
        if self.scaler is None:
            norm = self.shards.norm()
            self.rule.step(
                self.shards.gradients, self.lr, clip_factor(norm, self.clip), self._skipped(loss, norm, empty)
            )
            return norm
        inverse = self.scaler.inverse()
        norm, (skip, overflow) = self.shards.norm_and_excess(self.limits)
        norm = torch.where(skip, math.inf, norm * inverse)
        self.at_smallest.copy_(self.scaler.scale <= self.smallest_scale)
        others = self._skipped(loss, norm, empty)
        leave = skip if others is None else skip | others
        self.rule.step(self.shards.gradients, self.lr, clip_factor(norm, self.clip) * inverse, leave)
        self.scaler.update(overflow, skip, empty)
        self.gradient_scale.copy_(self.scaler.scale * self.micro_batch_weight)
        return norm

    def _skipped(self, loss: Tensor, norm: Tensor, empty: Tensor | None) -> Tensor | None:
        """Return whether the step is to be skipped for another reason than an overflow: bool scalar on the device; None
        where nothing asks."""
        if empty is not None:
            self.empty += empty
        if self.outliers is None:
            return empty
        outlier = self.outliers.update(loss, norm, empty)
        return outlier if empty is None else outlier | empty

    def follow(self, rates: list[float]) -> None:
        """Take other learning rates, as many as before."""
        self.schedule.copy_(torch.tensor(rates))

    def state(self) -> dict[str, Any]:
        """Return the optimizer's name and numbers for a checkpoint, which holds weights and the optimizer's state."""
        scaler = {} if self.scaler is None else {"loss_scale": self.scaler.state_dict()}
        fp8 = {} if self.fp8 is None else {STATE: self.fp8.state()}
        outliers = {} if self.outliers is None else {OUTLIERS: self.outliers.state_dict()}
        empty = {EMPTY: count} if (count := int(self.empty.item())) else {}
        updates = int(self.rule.updates.item())
        return {"optimizer": self.rule.kind, "updates": updates, **scaler, **fp8, **outliers, **empty}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the `state` of a checkpoint. One of another precision may lack the loss scale, which begins anew, or the
        scales of fp8, for which the next step observes the values; one of other options may lack the losses and norms
        among which outliers are found."""
        self.rule.updates.fill_(state["updates"])
        self.empty.fill_(state.get(EMPTY, 0))
        if self.fp8 is not None:
            self.fp8.restore(state.get(STATE, []))
        if self.outliers is not None and OUTLIERS in state:
            self.outliers.load_state_dict(state[OUTLIERS])
        if self.scaler is not None and "loss_scale" in state:
            self.scaler.load_state_dict(state["loss_scale"])
            self.gradient_scale.copy_(self.scaler.scale * self.micro_batch_weight)

    def check_overflow(self, norm: float) -> None:
        """Raise UserError where the last step, with the gradient norm `norm`, overflowed at the smallest loss scale: no
        later one will do better."""
        if not math.isfinite(norm) and self.at_smallest.item():
            raise UserError(
                f"gradients overflow at the smallest loss scale, {self.smallest_scale:g}; lower loss_scale.minimum or "
                "optimizer.lr, or use --precision bf16"
            )

    def metrics(self) -> dict[str, float]:
        """Return what a progress line adds: in fp16 the loss scale and the steps skipped so far; z-scores, where they
        are measured, and the updates that they skipped; how many steps had no token that counts, if any."""
        found: dict[str, float] = {} if self.outliers is None else self.outliers.metrics()
        if empty := int(self.empty.item()):
            found[EMPTY] = empty
        if self.scaler is not None:
            found["loss_scale"] = self.scaler.scale.item()
            found["skipped_steps"] = int(self.scaler.skipped.item())
        return found
