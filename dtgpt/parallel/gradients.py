"""Gradients as the optimizer wants them: in fp32 over all micro-batches, and over all replicas.

Where `fully_shard` cuts nothing, each block's gradients live in one flat fp32 tensor, a bucket. As soon as backward has
left a block, its gradients are added to the bucket in one pass, and with the last micro-batch the bucket is summed over
the replicas while backward goes on (Li et al. 2020, "PyTorch Distributed": buckets and overlap).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtgpt.model import GPT
from dtgpt.ops.adamw import Accumulator


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, laid out as the parameter is: autograd may have left it whole, or as addends."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


class Bucket:
    """The gradients of some parameters in one fp32 tensor."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, hooks: bool):
        self.parameters, self.group = parameters, group
        locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        self.flat = torch.zeros(sum(p.numel() for p in locals_), device=locals_[0].device)
        pieces = self.flat.split([p.numel() for p in locals_])
        self.totals = [piece.view(p.shape) for piece, p in zip(pieces, locals_, strict=True)]
        self._accumulator = Accumulator(self.totals)
        self.passes = self.done = self._arrived = 0
        self._sum: dist.Work | None = None
        if hooks:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._arrive)

    def begin(self, passes: int, done: int = 0) -> None:
        """Of `passes` backward passes that make a step, `done` are over."""
        self.passes, self.done, self._arrived = passes, done, 0

    def _arrive(self, parameter: nn.Parameter) -> None:
        self._arrived += 1
        if self._arrived == len(self.parameters):
            self._arrived = 0
            self.take()

    def take(self) -> None:
        """Add what a backward pass left on the parameters; after the last pass, begin the sum over the replicas."""
        gradients = [local_gradient(p) for p in self.parameters]
        (self._accumulator.add if self.done else self._accumulator.store)(gradients)
        for parameter in self.parameters:
            parameter.grad = None
        self.done += 1
        if self.done == self.passes and self.group is not None:
            self._sum = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        if self._sum is not None:
            self._sum.wait()
            self._sum = None


class Buckets:
    """A bucket for each block of this rank's stages and one for the ends of each."""

    def __init__(self, stages: list[GPT], group: dist.ProcessGroup | None, hooks: bool):
        self.hooks = hooks
        self.all = [Bucket(part, group, hooks) for stage in stages for part in _parts(stage)]

    def begin(self, passes: int, done: int = 0) -> None:
        for bucket in self.all:
            bucket.begin(passes, done)

    def finish(self) -> None:
        """Wait for the sums. A schedule that cuts backward in two calls no hooks: then everything is taken here."""
        if not self.hooks:
            for bucket in self.all:
                bucket.begin(passes=1)
                bucket.take()
        for bucket in self.all:
            bucket.wait()

    def totals(self) -> dict[nn.Parameter, Tensor]:
        return {p: t for bucket in self.all for p, t in zip(bucket.parameters, bucket.totals, strict=True)}


def _parts(stage: GPT) -> list[list[nn.Parameter]]:
    """Parameters that belong together, each tensor once."""
    blocks = [list(block.parameters()) for block in stage.blocks.values()]
    inside = {id(p) for block in blocks for p in block}
    ends = [p for p in stage.parameters() if id(p) not in inside]
    return [part for part in [*blocks, ends] if part]
