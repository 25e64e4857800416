"""What a step keeps for the next one, beside weights and the optimizer's state.

The loss scale of fp16 is such a state, which a capability adds where a run asks for it. An update goes through the
list of states (`Update.states`), and a checkpoint has an entry for each: neither knows which there are. If states were
fields of the update, it would have a branch, an entry and a check for every kind.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.engine import TrainingEngine
from dtgpt.parallel.shards import Shards


class StepState:
    """A state has `name`, `state` and `restore`, and those of the other methods that it needs.

    What `update` reads and writes lies on the device and is changed in place: it is captured in a CUDA graph, with the
    step. Every rank has its own copy. They stay equal where a state follows from sums over all ranks.
    """

    name: str  # of its entry in a checkpoint

    def attach(self, stages: Iterable[Decoder]) -> None:
        """Give the modules of this rank what they compute with, once, before the first step."""

    def scaled_by(self, scale: Tensor) -> None:
        """Take note of what gradients of the mean loss of a micro-batch are multiplied by: a scalar on the device, read
        in each pass."""

    def before(self, engine: TrainingEngine, batch: Batch, micro_batches: int) -> None:
        """Take note of this replica's part of the batch of a step before its gradients are computed, in so many
        micro-batches. Runs outside of CUDA graphs; the engine may compute with the batch."""

    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> Tensor | None:
        """Take note of a step, after its gradients and before the weights change. Return whether they are to stay as
        they are: bool scalar on the device, the same on all ranks; None: nothing speaks against the step.

        loss: this rank's part of the mean loss. norm: of the global gradient. empty: bool scalar, true where no token
        of the global batch counts; None: some do."""
        return None

    def check(self, norm: float) -> None:
        """Raise UserError where no later step will do better than the last one, whose gradient has this norm."""

    def metrics(self) -> dict[str, float]:
        """Return what a record adds; may wait for the device."""
        return {}

    def as_loaded(self) -> AbstractContextManager[None]:
        """Compute, while the context lasts, as a model does that is loaded from a checkpoint."""
        return nullcontext()

    def state(self) -> Any:
        """Return plain values for a checkpoint, the same on every rank under any plan; None: there is nothing to say.
        Waits for the device."""
        raise NotImplementedError

    def restore(self, saved: Any) -> None:
        """Take what `state` returned under any plan. None: the checkpoint has no such entry, because it is older or
        that run had no such state."""
        raise NotImplementedError


class GradientScale(StepState):
    """A state whose `scale`, fp32 scalar, the loss is multiplied with. There is one at most."""

    scale: Tensor

    def inverse(self) -> Tensor:
        """Return the factor that undoes the scale in gradients, fp32 scalar."""
        raise NotImplementedError

    def norm(self, shards: Shards) -> tuple[Tensor, Tensor]:
        """Return the global norm of the gradients without the scale, infinite where `update` is going to skip the step,
        and what `inverse` returns."""
        raise NotImplementedError


def entries_of(states: Iterable[StepState]) -> dict[str, Any]:
    """Return what a checkpoint says of these states, by name."""
    return {state.name: saved for state in states if (saved := state.state()) is not None}


def restore_states(states: Iterable[StepState], entries: dict[str, Any]) -> None:
    for state in states:
        state.restore(entries.get(state.name))
