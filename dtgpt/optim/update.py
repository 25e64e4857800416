"""From gradients to new weights: learning rate, clipping, the optimizer's rule, and the states that a step keeps for
the next one. A checkpoint has an entry for each, which is checked also where a run has no such state.

A rule (`ops/optim`) changes the shards of weights and knows nothing of a run. What a run does around it is the same for
every rule and stands here, as arithmetic on the device: an `if` on the norm or on a flag of overflow would let the host
wait in each step, and could not be captured as a CUDA graph. So the rule is launched in a skipped step, too, and
changes nothing there.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.optim.step_state import GradientScale, StepState, entries_of, restore_states
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.util import seams
from dtgpt.util.errors import UserError


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that brings gradients of this global `norm` down to at most `limit` (0: no limit), fp32 on the
    device."""
    if limit == 0:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


class Update:
    """From the gradients of the shards to new weights: clipping, the optimizer's `rule`, and the `states` that a step
    leaves to the next. Nothing waits for the device.

    `schedule`, the learning rate of every update, lies on the device, for only the device knows how many steps were
    skipped: such a step does not count (as in Megatron-LM). `lr` is that of the last step. `gradient_scale` is what the
    gradient of a micro-batch's mean loss is to be multiplied by. `scaler`: the state that has a factor in it, if any.
    """

    def __init__(
        self,
        shards: Shards,
        config: OptimizerConfig,
        rates: list[float],
        micro_batch_weight: float,
        states: Sequence[StepState] = (),
    ):
        """rates: learning rates of every step; micro_batch_weight: by which the gradients of one
        micro-batch are multiplied in the sum over all."""
        self.shards, self.clip, self.states = shards, config.clip, list(states)
        device = shards.mesh.device
        self.rule = config.make(shards)
        self.schedule = torch.tensor(rates, device=device)
        self.lr = torch.zeros((), device=device)
        self.scaler = next((state for state in states if isinstance(state, GradientScale)), None)
        self.gradient_scale = torch.empty((), device=device)
        self.weigh_micro_batches(micro_batch_weight)
        for state in self.states:
            state.scaled_by(self.gradient_scale)

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
        """Take one step and return the global norm of the gradient. A step that one of the states wants skipped changes
        neither weights nor the optimizer's state on any rank, and the schedule does not go on. loss: this rank's part
        of the mean loss. empty: bool scalar, whether no token of the global batch counts; None: some do."""
        # The learning rate, by the number of updates so far: a skipped step does not count.
        update = self.rule.updates.long().clamp(max=len(self.schedule) - 1)
        torch.index_select(self.schedule, 0, update.view(1), out=self.lr.view(1))
        # The norm of the whole gradient, over all ranks; clipping and the loss scale are one factor in the rule.
        if self.scaler is None:
            norm = self.shards.norm()
            factor = clip_factor(norm, self.clip)
        else:
            norm, inverse = self.scaler.norm(self.shards)
            factor = clip_factor(norm, self.clip) * inverse
        # Each state takes note of the step, and may wish it skipped. What has a wish is decided on the device, so that
        # the rule is launched in any case, and leaves all as it is where the step is skipped.
        wishes = [state.update(loss, norm, empty) for state in self.states]
        skips = [wish for wish in wishes if wish is not None]
        self.rule.step(self.shards.gradients, self.lr, factor, reduce(or_, skips) if skips else None)
        if self.scaler is not None:  # its scale is that of the next step by now
            self.gradient_scale.copy_(self.scaler.scale * self.micro_batch_weight)
        return norm

    def follow(self, rates: list[float]) -> None:
        """Take other learning rates, as many as before."""
        self.schedule.copy_(torch.tensor(rates))

    def state(self) -> dict[str, Any]:
        """Return the optimizer's name and numbers for a checkpoint, which holds weights and the optimizer's state."""
        updates = int(self.rule.updates.item())
        return {"optimizer": self.rule.kind, "updates": updates, **entries_of(self.states)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the `state` of a checkpoint, which may be that of other options."""
        self.rule.updates.fill_(state["updates"])
        restore_states(self.states, state)
        self.weigh_micro_batches(self.micro_batch_weight)

    def check(self, norm: float) -> None:
        """Raise UserError where no later step will do better than the last one, whose gradient has this norm."""
        for state in self.states:
            state.check(norm)

    def metrics(self) -> dict[str, float]:
        """Return what the states add to a record. Waits for the device."""
        return {name: value for state in self.states for name, value in state.metrics().items()}


def make_states(recipe: Recipe, settings: Settings, mesh: Mesh) -> list[StepState]:
    """Return the states of a run. A capability has a function of these arguments for each of its own, which returns
    None where the recipe does not ask for the state."""
    added = (make(recipe, settings, mesh) for make in seams.listed("step_states", recipe))
    states = [state for state in added if state is not None]
    if settings.dtype == torch.float16 and not any(isinstance(state, GradientScale) for state in states):
        raise UserError("precision=fp16 needs a loss scale, and no capability here has one; use --precision bf16")
    return states
