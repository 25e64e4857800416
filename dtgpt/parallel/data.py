"""Data parallelism, and passes without a pipeline.

Replicas of whole weights sum their gradients bucket by bucket (`dtgpt.parallel.gradients`); every ZeRO level cuts
through `fully_shard` (Rajbhandari et al. 2020).
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtgpt.data.end_of_document import Marks
from dtgpt.model import GPT
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.passes import PLAIN, Passes
from dtgpt.parallel.shards import Shards


def shard_over_data(part: GPT, mesh: Mesh, dtype: torch.dtype) -> None:
    """Wrap each block, then what is around them. Weights travel in `dtype`, the one they compute in; gradients are
    summed in fp32."""
    plan, policy = mesh.plan, MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {
        "mesh": mesh.devices["shard"],
        "mp_policy": policy,
        "reshard_after_forward": plan.zero == 3 and plan.pp == 1,
    }
    # Torch warns of writing in place into what a wrapped module returns; nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*part.blocks.values(), part):
        sharded = fully_shard(module, **options)
        # Gradients are summed, not averaged: the loss already counts a micro-batch by its share of the global batch.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def reshard(*parts: GPT) -> None:
    """Let go of weights that a forward pass gathered: a replayed step gathers anew without telling `fully_shard`, which
    would take the old ones for good."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class Accumulation(Passes):
    """Forward and backward of each micro-batch in turn.

    A piece of graph is a micro-batch: the first, the last, or any between. With `fully_shard` it is all of them, since
    each pass waits for events of the one before, which must then be of the same graph.
    """

    def __init__(self, model: GPT, shards: Shards, graphs: Graphs):
        self.model, self.shards, self.graphs = model, shards, graphs
        self._loss = torch.zeros((), device=shards.mesh.device)

    def expect(self, micro_batches: int) -> None:
        if self.shards.buckets is not None:
            self.shards.buckets.expect(micro_batches)

    def gradients(self, micro_batches: int, windows: Tensor, keys: Tensor | None, marks: Marks = PLAIN) -> Tensor:
        if isinstance(self.model, FSDPModule):
            at_once = partial(self._accumulate, lambda name, work, *inputs: work(*inputs), micro_batches)
            self.graphs.run("micro-batches", at_once, windows, keys, *marks)
        else:
            self._accumulate(self.graphs.run, micro_batches, windows, keys, *marks)
        return self._loss

    def _accumulate(self, run: Callable, micro_batches: int, *inputs: Tensor | None) -> None:
        pieces = [[None] * micro_batches if x is None else x.chunk(micro_batches) for x in inputs]
        for index, piece in enumerate(zip(*pieces, strict=True)):
            name = f"micro-batch{' first' * (index == 0)}{' last' * (index == micro_batches - 1)}"
            run(name, partial(self._micro_step, index, micro_batches), *piece)

    def _micro_step(
        self, index: int, micro_batches: int, window: Tensor, key: Tensor | None, *marks: Tensor | None
    ) -> None:
        self._announce(index, micro_batches)
        loss = self.model(window[:, :-1], key, window[:, 1:], *marks)
        loss.backward()
        share = loss.detach() / micro_batches
        self._loss.copy_(share) if index == 0 else self._loss.add_(share)
        if index == micro_batches - 1:
            self.shards.take_gradients()

    def logits(self, tokens: Tensor) -> Tensor:
        return self._whole(tokens)

    def mean_loss(self, tokens: Tensor, targets: Tensor, marks: Marks = PLAIN) -> Tensor:
        return self._whole(tokens, targets, marks)

    @torch.no_grad()
    def _whole(self, tokens: Tensor, targets: Tensor | None = None, marks: Marks = PLAIN) -> Tensor:
        result = self.model(tokens, None, targets, *marks)
        reshard(self.model)
        return result

    def _announce(self, index: int, micro_batches: int) -> None:
        """Below ZeRO-2 gradients stay whole until the last micro-batch; below ZeRO-3 weights do."""
        if self.shards.buckets is not None:
            self.shards.buckets.begin(done=index)
        if isinstance(self.model, FSDPModule):
            zero, last = self.shards.mesh.plan.zero, index == micro_batches - 1
            self.model.set_requires_gradient_sync(last or zero >= 2)
            self.model.set_reshard_after_backward(last or zero == 3)
            self.model.set_is_last_backward(last)
