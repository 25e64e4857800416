"""Gradients as the optimizer wants them: summed in fp32 over all micro-batches, and over all replicas.

Where `fully_shard` cuts nothing, each block's gradients live in one flat tensor, a bucket. As soon as backward has left
a block, its gradients are added to the bucket in one pass, and with the last micro-batch the bucket is summed over the
replicas while backward goes on (Li et al. 2020, "PyTorch Distributed": buckets and overlap).
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtgpt.models.decoder import Decoder
from dtgpt.ops.collectives.layout import aligned
from dtgpt.ops.collectives.pushes import ALIGNED, Meeting, PushedSum, meeting_bytes
from dtgpt.ops.optim.gradients import Accumulator
from dtgpt.parallel.torch_private import SharedMemory, all_gather_single


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient, laid out as the parameter is: autograd may have left it whole, or as
    addends."""
    gradient = parameter.grad
    if gradient is None:
        raise ValueError("a backward pass left a parameter without a gradient")
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


class Sum:
    """The sum of one flat fp32 tensor over the replicas, in place."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup):
        self.flat, self.group = flat, group
        self._work: dist.Work | None = None

    def begin(self) -> None:
        self._work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


class NarrowSum(Sum):
    """The sum of 16-bit numbers, whose length the replicas divide: half the bytes are sent. Each rank sums its
    piece in fp32 and rounds once, so that the error does not grow with the replicas, as where sums are passed on.
    `pushed`: what does so by memory that the replicas share, with `flat` in it."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, pushed: PushedSum | None = None):
        super().__init__(flat, group)
        self._run = self._send if pushed is None else pushed.run
        self.pieces = torch.empty_like(flat) if pushed is None else pushed.pieces
        self._stream = _second_stream(flat.device) if flat.is_cuda else None

    def begin(self) -> None:
        if self._stream is None:
            self._run()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run()

    def _send(self) -> None:
        dist.all_to_all_single(self.pieces, self.flat, group=self.group)
        own = self.pieces.view(self.group.size(), -1).sum(0, dtype=torch.float32).to(self.flat.dtype)
        all_gather_single(self.flat, own, self.group)

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all buckets: PyTorch has few, and would in the end hand out the one that computes."""
    return torch.cuda.Stream(device)


class Bucket:
    """The gradients of some parameters: the sum of `passes` backward passes in fp32, and that over the replicas of
    `group`. What 16-bit weights send to other replicas has 16 bits too."""

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, passes: int, hooks: bool,
        pushed: PushedSum | None = None,
    ):  # fmt: skip
        """pushed: what sums over the replicas, where these share memory."""
        self.parameters, self.passes = parameters, passes
        locals_, dtype, length = _wire(parameters, group)
        flat = torch.zeros(length, dtype=dtype, device=locals_[0].device) if pushed is None else pushed.flat
        self.wire, self.sums = flat, _views(flat, locals_)
        self.flat, self._totals = self.wire, self.sums
        narrow = dtype != torch.float32
        if narrow and passes > 1:  # a single pass needs no sum of its own
            self.flat = torch.zeros(length, dtype=torch.float32, device=flat.device)
            self._totals = _views(self.flat, locals_)
        self._accumulator = Accumulator(self._totals) if self.flat.dtype == torch.float32 else None
        self._over_replicas: Sum | None = None
        if group is not None:
            self._over_replicas = NarrowSum(self.wire, group, pushed) if narrow else Sum(self.wire, group)
        self.done = self._arrived = 0
        if hooks:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._arrive)

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
        if self.done == self.passes and self._over_replicas is not None:
            if self.wire is not self.flat:
                self.wire.copy_(self.flat)
            self._over_replicas.begin()

    def wait(self) -> None:
        if self._over_replicas is not None:
            self._over_replicas.wait()

    def bytes(self) -> tuple[int, int]:
        """Return (bytes of gradients, bytes of padding) that the bucket holds."""
        held = [self.flat] if self.flat is self.wire else [self.flat, self.wire]
        if isinstance(self._over_replicas, NarrowSum):
            held.append(self._over_replicas.pieces)
        used, whole = sum(total.numel() for total in self.sums), sum(t.nbytes for t in held)
        gradients = sum(used * t.nbytes // self.flat.numel() for t in held)
        return gradients, whole - gradients


def _wire(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> tuple[list[Tensor], torch.dtype, int]:
    """Return the local tensors of some parameters, and dtype and length of the flat gradient that replicas send: in 16
    bits, whole words of each replica."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    dtype = torch.float32 if group is None else locals_[0].dtype
    multiple = 1 if group is None else group.size() * (1 if dtype == torch.float32 else ALIGNED)
    return locals_, dtype, aligned(sum(p.numel() for p in locals_), multiple)


def _views(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return the beginning of a flat tensor as tensors of the parameters' shapes."""
    sizes = [p.numel() for p in parameters]
    return [piece.view(p.shape) for piece, p in zip(flat[: sum(sizes)].split(sizes), parameters, strict=True)]


class Buckets:
    """A bucket for each block of this rank's stages and one for the ends of each. hooks: whether backward hands in each
    gradient; a schedule that cuts backward in two calls none, and sums the micro-batches itself. share: returns memory
    of so many bytes that the replicas of a host share, if they can; all ranks call it."""

    def __init__(
        self, stages: list[Decoder], group: dist.ProcessGroup | None, passes: int, hooks: bool,
        share: Callable[[int], SharedMemory | None] | None = None,
    ):  # fmt: skip
        self.hooks = hooks
        passes = passes if hooks else 1
        parts = [part for stage in stages for part in parameter_groups(stage)]
        pushed = _share(parts, group, share) if share and group else [None] * len(parts)
        self.all = [Bucket(part, group, passes, hooks, one) for part, one in zip(parts, pushed, strict=True)]

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


def _share(
    parts: list[list[nn.Parameter]], group: dist.ProcessGroup, share: Callable[[int], SharedMemory | None]
) -> Sequence[PushedSum | None]:
    """Return what sums each bucket in memory that the replicas share; None for each where they do not."""
    wires = [(length * dtype.itemsize, dtype) for _, dtype, length in (_wire(part, group) for part in parts)]
    sizes = [PushedSum.bytes(size, group.size()) for size, _ in wires]
    shared = share(sum(sizes) + meeting_bytes(group.size()))
    if shared is None:
        return [None] * len(parts)
    *areas, flags = zip(*(m.split([*sizes, meeting_bytes(group.size())]) for m in shared.of_ranks), strict=True)
    meeting = Meeting(flags, group.rank())
    return [PushedSum(area, *wire, meeting) for area, wire in zip(areas, wires, strict=True)]


def parameter_groups(stage: Decoder) -> list[list[nn.Parameter]]:
    """Return the parameters of each block, and those around the blocks, each tensor once."""
    blocks = [list(block.parameters()) for block in stage.blocks.values()]
    inside = {id(p) for block in blocks for p in block}
    ends = [p for p in stage.parameters() if id(p) not in inside]
    return [part for part in [*blocks, ends] if part]
