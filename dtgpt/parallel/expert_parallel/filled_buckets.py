"""A bucket to whose sums products of experts add gradients themselves.

A gradient of 16 bits is written once and read once for its sum alone: of a model that is nearly all experts, as much as
the fp32 sum itself. The product has it in registers, rounds it as it would, and adds it there: the same bits.
"""

from collections.abc import Callable, Sequence
from weakref import WeakMethod

from torch import Tensor, nn

from dtgpt.ops.experts.products import ADD_OUTER, Fill, fill_total
from dtgpt.ops.local_tensors import local
from dtgpt.ops.operation import load_kernels
from dtgpt.ops.optim.optimizer import Accumulator
from dtgpt.parallel.collectives import FlatSum
from dtgpt.parallel.gradients import Bucket, local_gradient
from dtgpt.parallel.mesh import own_axes_of
from dtgpt.util.torch_private import is_dtensor


class _Nothing(Accumulator):
    """What adds to no totals: products add to all of them."""

    def __init__(self) -> None:
        self.totals = []

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add nothing."""

    store = add


class FilledBucket(Bucket):
    """A bucket of parameters of which some are stacks of experts' matrices."""

    def __init__(self, parameters: list[nn.Parameter], over_replicas: FlatSum, passes: int, hooks: bool):
        super().__init__(parameters, over_replicas, passes, hooks)
        by_products = [hooks and self._accumulator is not None and gains(p) for p in parameters]
        self._filled = [p for p, own in zip(parameters, by_products, strict=True) if own]
        self._totals_filled = [t for t, own in zip(self._totals, by_products, strict=True) if own]
        self._others = [p for p, own in zip(parameters, by_products, strict=True) if not own]
        self._totals = [t for t, own in zip(self._totals, by_products, strict=True) if not own]
        if self._filled:
            self._accumulator = Accumulator(self._totals) if self._totals else _Nothing()
        self._done_with: set[int] = set()  # indices of those that products have filled in this pass
        for index, parameter in enumerate(self._filled):
            fill_total(parameter, _weakly(self._fill, index))

    def begin(self, done: int = 0) -> None:
        super().begin(done)
        self._done_with.clear()

    def _fill(self, index: int, fill: Fill) -> None:
        """Let `fill` set a total to a gradient, or add it. Raises ValueError where a pass does so twice: the total
        would be another sum than that of the gradients of passes."""
        if index in self._done_with:
            raise ValueError("a pass multiplies twice by matrices of experts whose gradients products add up")
        fill(self._totals_filled[index], self.done == 0)
        self._done_with.add(index)
        super()._arrive(self._filled[index])

    def _arrive(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # autograd may call a hook for the gradient that a product has left out, too
            super()._arrive(parameter)

    def take(self) -> None:
        for index, (parameter, total) in enumerate(zip(self._filled, self._totals_filled, strict=True)):
            if index not in self._done_with:  # by a product that knows no totals
                gradient, parameter.grad = local_gradient(parameter), None
                total.add_(gradient) if self.done else total.copy_(gradient)
        self._done_with.clear()
        every, self.parameters = self.parameters, self._others
        super().take()
        self.parameters = every


def _weakly(method: Callable[[int, Fill], None], index: int) -> Callable[[Fill], None]:
    """Return the method of an index, without keeping its object alive: Python finds no cycle through a parameter."""
    called = WeakMethod(method)

    def fill(add: Fill) -> None:
        if (alive := called()) is not None:
            alive(index, add)

    return fill


def gains(parameter: nn.Parameter) -> bool:
    """Return whether a kernel adds the gradients of a parameter to a total as it makes them."""
    if parameter.dim() != 3 or (is_dtensor(parameter) and not own_axes_of(parameter)):
        return False
    load_kernels(ADD_OUTER.name)
    return any(kernel.serves(*_example(local(parameter).detach())) for kernel in ADD_OUTER.kernels)


def _example(parameter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Return arguments of the operation for a stack of matrices, of one row."""
    count, out, size = parameter.shape
    ends = parameter.new_empty(count).int()
    return parameter.new_empty(1, out), parameter.new_empty(1, size), ends, parameter.new_empty(0), True
