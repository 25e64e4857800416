"""What sums gradients over micro-batches and replicas: one kind for a run, chosen from its settings.

`DistributedDataParallel` would wrap the model, cut its buckets by size, and know neither fp32 sums of 16-bit
micro-batches nor ZeRO. `Sums` is chosen once, so that no part of a step asks which of these a run has.

A training step fills the sums and takes the gradients from them. What a kind takes and sends follows from settings
and shapes alone: `costs` names the class that says so for `dtgpt plan`.

Where `fully_shard` cuts nothing, each block's gradients live in one flat tensor, a bucket. As soon as backward has left
a block, its gradients are added to the bucket in one pass, and with the last micro-batch the bucket is summed over the
replicas while backward goes on (Li et al. 2020, "PyTorch Distributed": buckets and overlap).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.decoder import Decoder
from dtgpt.ops.optim.optimizer import Accumulator, squared_norm
from dtgpt.parallel.collectives import FlatSum, flat_length, transport
from dtgpt.parallel.mesh import Mesh, own_axes_of
from dtgpt.util import seams
from dtgpt.util.torch_private import is_dtensor


class Sums:
    """No sums of their own: autograd adds up micro-batches on the parameters, and nobody has other gradients of them.

    orderless: whether sums do not depend on their order, and so have the same bits under every plan.
    spans_tp: whether it is so for plans of any tp.
    total: the type in which addends of several ranks are added.
    cuts: whether a rank holds its part of gradients only.
    pushed_dtype: the type of gradients that a faster transport scatters under ZeRO.
    costs: the class that says how many bytes sums of a capability take and send, as 'module:class'; empty: that of
        what they derive from.
    """

    orderless = spans_tp = False
    total = torch.float32
    costs = ""

    def __init__(self, settings: Settings):
        plan, several = settings.plan, settings.micro_batches > 1
        self.settings = settings
        # ZeRO-2 cuts gradients as they come, ZeRO-1 after the last micro-batch, before which `fully_shard` sums in
        # fp32; a pipeline sums all micro-batches before it cuts.
        summed_before = plan.pp > 1 or (plan.zero == 1 and several)
        self.cuts = plan.zero > 0 and not summed_before
        self.pushed_dtype = torch.float32 if summed_before else settings.dtype

    def open(self, stages: list[Decoder], mesh: Mesh) -> None:
        """Make what sums the gradients of the stages. All ranks of the mesh take part."""

    def expect(self, passes: int) -> None:
        """Set the backward passes of the following steps, at most those of the first."""

    def begin(self, done: int = 0) -> None:
        """Take note that `done` backward passes of the step are over."""

    def totals(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Hold the current stream until the sums over micro-batches and replicas are complete, and return this rank's
        part for each parameter; further addends may be added to it."""
        return [local_gradient(p) for p in parameters]

    def gradients(self, parameters: Sequence[nn.Parameter], totals: list[Tensor]) -> list[Tensor]:
        """Return the gradients of which these are the totals, now with all addends."""
        return totals

    def squares(self, gradients: list[Tensor], shares: Tensor, alone: list[Tensor]) -> Tensor:
        """Return numbers `[n]` whose sum over the ranks makes the squared norm of the gradient. Each of the `gradients`
        counts by its one of `shares`; `alone`: those that this rank alone counts, if others are left out."""
        return (squared_norm(gradients) * shares).sum().view(1)

    def root(self, squares: Tensor) -> Tensor:
        """Return the norm, fp32 scalar, from sums over the ranks of `squares`."""
        return squares[0].sqrt()


class Buckets(Sums):
    """A bucket for each of the `parameter_groups` of this rank's stages."""

    hooks = True  # whether backward hands in each gradient

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.all: list[Any] = []

    def open(self, stages: list[Decoder], mesh: Mesh) -> None:
        """Make the buckets. A schedule that cuts backward in two calls no hooks, and sums the micro-batches itself."""
        self.hooks = not self.settings.plan.splits_backward
        passes = self.settings.micro_batches if self.hooks else 1
        groups = [part for stage in stages for _, part in parameter_groups(stage)]
        kind = next(iter(seams.listed("buckets", self.settings)), Bucket)
        for own in (False, True) if self.settings.plan.own_axes else (False,):  # on every rank, also without such parts
            parts = [part for part in groups if bool(own_axes_of(part[0])) is own]
            self.all += [
                kind(part, one, passes, self.hooks)
                for part, one in zip(parts, self._open_sums(mesh, mesh.group("replicate", own), parts), strict=True)
            ]

    def _open_sums(
        self, mesh: Mesh, group: dist.ProcessGroup | None, parts: list[list[nn.Parameter]]
    ) -> Sequence[FlatSum]:
        """Return what sums the flat gradients of some parameters over the ranks of a group."""
        wires = [_wire(part, group) for part in parts]
        narrow = self.settings.plan.narrows_weights and self.settings.dtype.itemsize == 2
        if narrow and group and (sums := transport().open_sums(mesh, group, wires)) is not None:
            return sums
        devices = [_locals(part)[0].device for part in parts]
        flats = [torch.zeros(n, dtype=dtype, device=where) for (dtype, n), where in zip(wires, devices, strict=True)]
        kind = next(iter(seams.listed("flat_sums")), FlatSum)
        return [(kind if group and x.dtype != torch.float32 else FlatSum)(x, group) for x in flats]

    def expect(self, passes: int) -> None:
        for bucket in self.all:
            bucket.passes = passes if self.hooks else 1

    def begin(self, done: int = 0) -> None:
        for bucket in self.all:
            bucket.begin(done)

    def totals(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        for bucket in self.all if not self.hooks else ():  # then everything is taken now
            bucket.begin()
            bucket.take()
        for bucket in self.all:  # only now: the sums of the first buckets travelled while backward made the last
            bucket.wait()
        found = {p: t for bucket in self.all for p, t in zip(bucket.parameters, bucket.sums, strict=True)}
        return [found[p] for p in parameters]


def choose_sums(settings: Settings) -> Sums:
    """Return what sums the gradients of a run: a kind that a capability brings by its name in `reduce`; buckets, where
    replicas or micro-batches in 16 bits are to be summed; or nothing but autograd, and under ZeRO `fully_shard`."""
    if part := seams.added("sums").get(settings.reduce):
        return seams.load(part)(settings)
    several = settings.micro_batches > 1 and settings.low_precision
    buckets = (settings.plan.data_ranks > 1 or several) and not settings.plan.zero
    return Buckets(settings) if buckets else Sums(settings)


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
            if self._accumulator is None:  # of a single pass, whose gradients are sent in their own 16 bits
                torch._foreach_copy_(self._totals, gradients)
            elif self.done:
                self._accumulator.add(gradients)
            else:
                self._accumulator.store(gradients)
        for parameter in self.parameters:  # or autograd would add the next pass to it
            parameter.grad = None
        self.done += 1
        if self.done == self.passes:
            if self.wire is not self.flat:
                self.wire.copy_(self.flat)
            self._over_replicas.begin()

    def wait(self) -> None:
        self._over_replicas.wait()


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


def parameter_groups(stage: Decoder) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return (module, trained parameters) of each block, and of the stage for those around the blocks, each tensor
    once; before those of a block, of each module in it whose parameters other ranks share than the rest."""
    modules = [m for block in stage.blocks.values() for m in (*filter(_lies_apart, block.modules()), block)]
    found, seen = [], set[int]()
    for module in (*modules, stage):
        part = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, part))
        found += [(module, part)] if part else []
    return found


def _lies_apart(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and all(map(own_axes_of, parameters))


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient that a backward pass left. Raises ValueError where it left none."""
    if parameter.grad is None:
        raise ValueError("a backward pass left a parameter without a gradient")
    return local_part(parameter.grad, parameter)


def local_part(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient, which may be whole or an addend, laid out as the parameter is."""
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
