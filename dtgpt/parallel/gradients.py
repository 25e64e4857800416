"""Gradients as the optimizer wants them: summed in fp32 over all micro-batches, and over all replicas.

Where `fully_shard` cuts nothing, each block's gradients live in one flat tensor, a bucket. As soon as backward has left
a block, its gradients are added to the bucket in one pass, and with the last micro-batch the bucket is summed over the
replicas while backward goes on (Li et al. 2020, "PyTorch Distributed": buckets and overlap).
"""

from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.comm.reduce import FlatSum, flat_length, open_sums
from dtgpt.models.decoder import Decoder
from dtgpt.ops.optim.gradients import Accumulator
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.torch_private import is_dtensor


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient, laid out as the parameter is: autograd may have left it whole, or as
    addends."""
    if parameter.grad is None:
        raise ValueError("a backward pass left a parameter without a gradient")
    return local_part(parameter.grad, parameter)


def local_part(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient of the parameter, as `local_gradient` does."""
    if not (is_dtensor(gradient) and is_dtensor(parameter)):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def call_on_gradients(parameters: Iterable[nn.Parameter], method: Callable[[nn.Parameter], None]) -> None:
    """Let backward call a method as soon as a parameter has its gradient. The parameters do not keep the method's
    object alive: Python finds no cycle through such a hook, and the process group of the object would never end."""
    called = WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := called()) is not None:
            alive(parameter)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)


class Bucket:
    """The gradients of some parameters: the sum of `passes` backward passes in fp32, and that over the replicas. What
    16-bit weights send to other replicas has 16 bits too."""

    def __init__(self, parameters: list[nn.Parameter], over_replicas: FlatSum, passes: int, hooks: bool):
        """over_replicas: what sums over the replicas, in the type and of the length that `_wire` returns."""
        self.parameters, self.passes, self._over_replicas = parameters, passes, over_replicas
        self.wire, locals_ = over_replicas.flat, _locals(parameters)
        self.sums = _views(self.wire, locals_)
        self.flat, self._totals = self.wire, self.sums
        if self.wire.dtype != torch.float32 and passes > 1:  # a single pass needs no sum of its own
            self.flat = torch.zeros(self.wire.shape, dtype=torch.float32, device=self.wire.device)
            self._totals = _views(self.flat, locals_)
        self._accumulator = Accumulator(self._totals) if self.flat.dtype == torch.float32 else None
        self.done = self._arrived = 0
        if hooks:
            call_on_gradients(parameters, self._arrive)

    def begin(self, done: int = 0) -> None:
        """Take note that `done` backward passes of the step are over."""
        self.done, self._arrived = done, 0

    def _arrive(self, parameter: nn.Parameter) -> None:
        self._arrived += 1
        if self._arrived == len(self.parameters):
            self._arrived = 0
            self.take()

    def take(self) -> None:
        """Add what a backward pass left on the parameters; after the last pass, begin the sum over the replicas."""
        gradients = [local_gradient(p) for p in self.parameters]
        with torch.no_grad():
            if self._accumulator is None:
                torch._foreach_copy_(self._totals, gradients)
            elif self.done:
                self._accumulator.add(gradients)
            else:
                self._accumulator.store(gradients)
        for parameter in self.parameters:
            parameter.grad = None
        self.done += 1
        if self.done == self.passes:
            if self.wire is not self.flat:
                self.wire.copy_(self.flat)
            self._over_replicas.begin()

    def wait(self) -> None:
        self._over_replicas.wait()

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients, bytes of padding) that the bucket holds."""
        held = self._over_replicas.held() + ([] if self.flat is self.wire else [self.flat])
        used, whole = sum(total.numel() for total in self.sums), sum(t.nbytes for t in held)
        gradients = sum(used * t.nbytes // self.flat.numel() for t in held)
        return gradients, whole - gradients


def _locals(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.to_local() if is_dtensor(p) else p for p in parameters]


def _wire(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> tuple[torch.dtype, int]:
    """Return dtype and length of the flat gradient that the replicas of `group` send."""
    locals_ = _locals(parameters)
    dtype = torch.float32 if group is None else locals_[0].dtype
    return dtype, flat_length(sum(p.numel() for p in locals_), dtype, 1 if group is None else group.size())


def _views(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return the beginning of a flat tensor as tensors of the parameters' shapes."""
    sizes = [p.numel() for p in parameters]
    return [piece.view(p.shape) for piece, p in zip(flat[: sum(sizes)].split(sizes), parameters, strict=True)]


class Sums(Protocol):
    """The sums of gradients over micro-batches and replicas, which passes of a step fill."""

    hooks: bool  # whether backward hands in each gradient

    def expect(self, passes: int) -> None:
        """Set the backward passes of the following steps, at most those of the first."""

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients and their sums, bytes of padding) that are held."""

    def begin(self, done: int = 0) -> None:
        """Take note that `done` backward passes of the step are over."""

    def finish(self) -> None:
        """Hold the current stream until the sums are complete."""

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's part of the sum for each parameter, after `finish`."""

    def units(self) -> dict[nn.Parameter, Tensor]:
        """Return for the parameters whose sums are integers what one stands for, fp32 scalar."""


class Buckets:
    """A bucket for each block of this rank's stages and one for the ends of each. hooks: whether backward hands in each
    gradient; a schedule that cuts backward in two calls none, and sums the micro-batches itself. everyone: the mesh,
    all ranks of which take part, for replicas that share memory where they can; None: they do not try."""

    def __init__(
        self, stages: list[Decoder], group: dist.ProcessGroup | None, passes: int, hooks: bool,
        everyone: Mesh | None = None,
    ):  # fmt: skip
        self.hooks = hooks
        passes = passes if hooks else 1
        parts = [part for stage in stages for part in parameter_groups(stage)]
        sums = open_sums(everyone, group, [_wire(part, group) for part in parts], _locals(parts[0])[0].device)
        self.all = [Bucket(part, one, passes, hooks) for part, one in zip(parts, sums, strict=True)]

    def expect(self, passes: int) -> None:
        """Set the backward passes of the following steps, at most those of the first."""
        for bucket in self.all:
            bucket.passes = passes if self.hooks else 1

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients, bytes of padding) that the buckets hold."""
        used, padding = zip(*(bucket.bytes() for bucket in self.all), strict=True)
        return sum(used), sum(padding)

    def begin(self, done: int = 0) -> None:
        for bucket in self.all:
            bucket.begin(done)

    def finish(self) -> None:
        """Wait for the sums, and without hooks take everything now."""
        if not self.hooks:
            for bucket in self.all:
                bucket.begin()
                bucket.take()
        for bucket in self.all:
            bucket.wait()

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Return the whole gradient of each parameter, after `finish`."""
        return {p: t for bucket in self.all for p, t in zip(bucket.parameters, bucket.sums, strict=True)}

    def units(self) -> dict[nn.Parameter, Tensor]:
        return {}


def parameter_groups(stage: Decoder) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each block, and those around the blocks, each tensor once."""
    blocks = [[p for p in block.parameters() if p.requires_grad] for block in stage.blocks.values()]
    inside = {id(p) for block in blocks for p in block}
    ends = [p for p in stage.parameters() if p.requires_grad and id(p) not in inside]
    return [part for part in [*blocks, ends] if part]
