"""AdamW over fp32 master weights (Loshchilov and Hutter 2019), with gradient scaling and casts fused in.

PyTorch's AdamW takes gradients in the type of the weights that it updates. With fp32 masters and 16-bit modules this
needs a pass that widens gradients before it and one that rounds weights after it, and an update does nothing but read
and write memory.

A step reads the gradients once, in the dtype that autograd gave them (bf16, fp16 or fp32): it scales them (clipping and
the inverse of the loss scale), updates master weights and moments in fp32, and rounds the weights that the model
computes with. Where a flag on the device says so it changes nothing. It never waits for the device, and a CUDA graph
may capture it.

Definition: `reference`, of one tensor. The operation is the rule of all tensors of a run. It is no op of PyTorch, since
neither autograd nor torch.compile sees an optimizer step.
Sharding rule: everything is elementwise, so a rank passes its shard of each tensor, whatever its placement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dtgpt.ops.operation import Operation
from dtgpt.ops.optim.optimizer import DTYPES, checked


@dataclass(frozen=True)
class Slot:
    """A weight, or this rank's shard of it. Contiguous, and updated in place: its memory must not be replaced."""

    master: Tensor  # fp32
    low_precision: Tensor | None  # bf16 or fp16, of the same shape: the rounded master, with which the model computes
    decay: bool


def reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (master, exp_avg, exp_avg_sq) after a step, in plain torch: the test oracle. numbers: fp32 `[4]`,
    the factor of gradients, that of decay, the rate, and the root of the second bias correction."""
    scale, kept, rate, root = numbers.unbind()
    gradient = gradient.to(master.dtype) * scale
    exp_avg = exp_avg + (1 - betas[0]) * (gradient - exp_avg)
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * gradient * gradient
    return master * kept - rate * (exp_avg / (exp_avg_sq.sqrt() / root + eps)), exp_avg, exp_avg_sq


Update = Callable[[list[Tensor], Tensor, Tensor | None], None]  # of gradients, `AdamW._numbers` and `skip`


def _plain_update(
    _: Tensor,
    slots: Sequence[Slot],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
) -> Update:
    return partial(_update, slots, exp_avg, exp_avg_sq, betas, eps)


def _update(
    slots: Sequence[Slot],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
    gradients: list[Tensor],
    numbers: Tensor,
    skip: Tensor | None,
) -> None:
    no_decay = numbers.clone()
    no_decay[1] = 1  # the factor that decay applies to weights
    for slot, exp_avg, exp_avg_sq, gradient in zip(slots, exp_avgs, exp_avg_sqs, gradients, strict=True):
        factors = numbers if slot.decay else no_decay
        new = reference(slot.master, exp_avg, exp_avg_sq, gradient, factors, betas, eps)
        for old, value in zip((slot.master, exp_avg, exp_avg_sq), new, strict=True):
            old.copy_(value if skip is None else torch.where(skip, old, value))
        if slot.low_precision is not None:
            rounded = slot.master.to(slot.low_precision.dtype)
            slot.low_precision.copy_(rounded if skip is None else torch.where(skip, slot.low_precision, rounded))


ADAMW = Operation("adamw", _plain_update, "the rule of AdamW, for all weights of a run")


class AdamW:
    """Update weights and their moments: an `Optimizer` (`dtgpt.ops.optim.optimizer`).

    The whole state is `exp_avg` and `exp_avg_sq`, fp32 and in the order of the slots, and `updates`, the number of
    updates applied. To restore the state, copy into these tensors.
    """

    kind = "adamw"
    takes: Mapping[str, Mapping[str, str | None]] = {}

    def __init__(self, slots: Sequence[Slot], beta1: float, beta2: float, eps: float, weight_decay: float):
        """Raise ValueError where a slot does not meet the requirements of `Slot`."""
        for i, slot in enumerate(slots):
            _check_slot(i, slot)
        self.slots = tuple(slots)
        self._masters = [slot.master.detach() for slot in slots]
        self.exp_avg = tuple(torch.zeros_like(m) for m in self._masters)
        self.exp_avg_sq = tuple(torch.zeros_like(m) for m in self._masters)
        self._weight_decay = weight_decay
        device = self._masters[0].device
        self.updates = torch.zeros((), dtype=torch.float64, device=device)  # an exponent: counts exactly up to 2^53
        self._decays = torch.tensor([beta1, beta2], dtype=torch.float64, device=device)
        rest = (self.slots, self.exp_avg, self.exp_avg_sq, (beta1, beta2), eps)
        self._update: Update = ADAMW(self._masters[0], *rest)

    def state(self, index: int) -> dict[str, Tensor]:
        """Return the moments of slot `index`, by their names in checkpoints."""
        return {"exp_avg": self.exp_avg[index], "exp_avg_sq": self.exp_avg_sq[index]}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor, scale: Tensor, skip: Tensor | None = None) -> None:
        """Apply one update.

        gradients: one for each slot, in the same order; fp32, bf16 or fp16. lr: fp32 scalar on the device. scale: fp32
        scalar on the device, a factor of the gradients. skip: bool scalar on the device; where it is true nothing
        changes, whatever the values of gradients and scale. Raises ValueError where a gradient does not have its slot's
        shape and device.
        """
        gradients = checked(gradients, self._masters)
        self._update(gradients, self._numbers(lr, scale), skip)
        self.updates += 1 if skip is None else ~skip

    def _numbers(self, lr: Tensor, scale: Tensor) -> Tensor:
        """Return fp32 `[4]`: the factor of gradients, the factor that decay applies to weights, the learning rate
        divided by the first moment's bias correction, and the square root of the second's. Computed in fp64, since
        1 - beta^t cancels for small t."""
        first, second = (1 - self._decays ** (self.updates + 1)).unbind()
        lr = lr.double()
        return torch.stack([scale.double(), 1 - lr * self._weight_decay, lr / first, second.sqrt()]).float()


def _check_slot(i: int, slot: Slot) -> None:
    master, narrow = slot.master, slot.low_precision
    if master.dtype != torch.float32 or not master.is_contiguous():
        raise ValueError(f"slot {i}: the master must be fp32 and contiguous")
    if narrow is None:
        return
    if narrow.dtype not in DTYPES[1:] or not narrow.is_contiguous():
        raise ValueError(f"slot {i}: the narrow weight must be bf16 or fp16, and contiguous")
    if narrow.shape != master.shape or narrow.device != master.device:
        raise ValueError(f"slot {i}: master and narrow weight must be of one shape and on one device")
