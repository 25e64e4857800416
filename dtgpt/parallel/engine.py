"""What the training loop asks of a plan: gradients of a batch, losses, logits.

The loop does not know how many micro-batches, stages or ranks there are. An engine runs them in their order, and leaves
the summed gradients in the shards: without a pipeline the one below, with one that of `dtgpt.parallel.pipeline`.

Where a step could be replayed as CUDA graphs, or be measured, it calls `Graphs` and `Timers`, which do neither here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.util import seams

if TYPE_CHECKING:  # half a second to import, which a run without ZeRO does not need
    from torch.distributed.fsdp import FSDPModule

Result = TypeVar("Result")


class Graphs:
    """Pieces of a step by name. Here each runs as it is; a capability replays them as CUDA graphs.

    enabled: whether pieces are going to be captured: then timers cannot measure within them.
    captured: whether steps are replayed by now: then nothing that they left may be freed.
    """

    enabled = False

    @property
    def captured(self) -> bool:
        return False

    def run(self, name: str, work: Callable[..., Result], *inputs: Tensor | None) -> Result:
        """Return what `work(*inputs)` returns."""
        return work(*inputs)

    def next_step(self) -> None:
        """Take note that a step begins."""

    def restart(self) -> None:
        """Forget the pieces because steps change."""

    def release(self) -> None:
        """Forget the pieces before the process group ends."""


def open_graphs(wanted: bool) -> Graphs:
    """Return what runs the pieces of a step, as graphs where these are wanted. All that is queued from here on may be
    captured."""
    kinds = seams.listed("graphs") if wanted else []
    return kinds[0]() if kinds else Graphs()


class Timers:
    """Times of the parts of a step. Here nothing is measured; a capability does where `enabled`."""

    enabled = False

    def measure(self, name: str, host: bool = False) -> AbstractContextManager[None]:
        """Return a context that adds its time to that of `name`. host: measure the host, not the device's queue."""
        return nullcontext()

    def next_step(self) -> None:
        """Count a step."""

    def seconds(self, mesh: Mesh) -> dict[str, float]:
        """Return the mean seconds of the parts of a step since the last call, as figures of a record: those of the
        slowest rank for each part. Waits for the device."""
        return {}

    def line(self, record: Mapping[str, float], graphs: bool) -> str:
        """Return what the console shows of these figures of a record. graphs: whether steps are replayed as graphs."""
        return ""


NO_TIMERS = Timers()


class TrainingEngine(ABC):
    shards: Shards

    @abstractmethod
    def gradients(self, micro_batches: int, batch: Batch) -> Tensor:
        """Leave in the shards the gradient of the global batch, of which `batch` is this replica's part, run in
        `micro_batches` equal pieces; times the `gradient_scale` of the output layer.

        Returns the mean loss, detached: 0 on a rank that does not hold the head. The next call returns the same tensor
        with another value.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor | None:
        """Return the mean over targets of loss times weight, without dropout or gradient; None on a rank that does not
        hold the head. Without targets, return the logits."""

    def expect(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the following steps: at most that of the first, for which memory was made.
        Captured graphs have been dropped, since they hold the old number."""
        self.shards.sums.expect(micro_batches)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return this rank's columns of the logits `[B, T, V_local]` of `tokens [B, T]`, without dropout or gradient;
        None on a rank that does not hold the head."""
        return self.evaluate(Batch(tokens))


def orderless_mean(losses: Tensor, micro_batches: int, shards: Shards) -> Tensor:
    """Return what the mean losses of some of this replica's micro-batches add to its mean loss. Each is rounded to fp32
    as an addend of the mean over the global batch, so that fp64 holds sums of them exactly, in any order, unless one is
    more than a million times another."""
    dp = shards.mesh.plan.dp
    return dp * (losses.detach() / (micro_batches * dp)).double().sum()


class SingleStageEngine(TrainingEngine):
    """Forward and backward of each micro-batch in turn.

    A graph holds one micro-batch: the first, the last, or any between. With `fully_shard` it holds all of them, since
    each pass waits for events of the one before, which must then be of the same graph.
    """

    def __init__(self, model: Decoder, shards: Shards, graphs: Graphs, timers: Timers):
        self.model, self.shards, self.graphs = model, shards, graphs
        self.timers = NO_TIMERS if graphs.enabled else timers  # a replay is not divided
        dtype = torch.float64 if shards.sums.orderless else torch.float32
        self._loss = torch.zeros((), device=shards.mesh.device, dtype=dtype)

    def gradients(self, micro_batches: int, batch: Batch) -> Tensor:
        if self.shards.mesh.plan.zero:
            without_graphs = partial(self._accumulate, lambda name, work, *inputs: work(*inputs), micro_batches)
            self.graphs.run("micro-batches", without_graphs, *batch)
        else:
            self._accumulate(self.graphs.run, micro_batches, *batch)
        return self._loss

    def _accumulate(self, run: Callable[..., Any], micro_batches: int, *fields: Tensor | None) -> None:
        for index, piece in enumerate(Batch._make(fields).chunk(micro_batches)):
            name = f"micro-batch{' first' * (index == 0)}{' last' * (index == micro_batches - 1)}"
            run(name, partial(self._micro_step, index, micro_batches), *piece)

    def _micro_step(self, index: int, micro_batches: int, *fields: Tensor | None) -> None:
        last = index == micro_batches - 1
        self.shards.sums.begin(done=index)  # before backward, whose hooks count the gradients that arrive
        if zero := self.shards.mesh.plan.zero:
            set_step_phase(self.model, zero, last)
        with self.timers.measure("forward"):
            loss = self.model(*fields)
        with self.timers.measure("backward"):
            loss.backward()
        orderless = self.shards.sums.orderless
        part = orderless_mean(loss, micro_batches, self.shards) if orderless else loss.detach() / micro_batches
        self._loss.copy_(part) if index == 0 else self._loss.add_(part)
        if last:
            self.shards.take_gradients()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        result = self.model(*batch)
        reshard(self.model)
        return result


def is_wrapped(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return whether `fully_shard` has wrapped the module."""
    return hasattr(type(module), "set_requires_gradient_sync")


def set_step_phase(model: Decoder, zero: int, last: bool) -> None:
    """Prepare for a micro-batch: below ZeRO-2 gradients stay whole until the last one, below ZeRO-3 weights do. At the
    end of the last one `fully_shard` waits for its reductions, and leaves them running after the others."""
    if is_wrapped(model):
        model.set_requires_gradient_sync(last or zero >= 2)
        model.set_reshard_after_backward(last or zero == 3)
        model.set_is_last_backward(last)


def reshard(*parts: Decoder) -> None:
    """Free the weights that a forward pass all-gathered: a replayed step gathers them again without the knowledge of
    `fully_shard`, which would take the old ones for current."""
    for part in parts:
        for module in part.modules():
            if is_wrapped(module):
                module.reshard()
