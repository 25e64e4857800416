"""Operations, and what serves them.

PyTorch's dispatcher chooses by the device of a tensor. Here its type, shapes and other arguments decide, too, each
kernel can say in words why it does not serve (docs/kernels.md), and a kernel's module is not imported before it could
serve.

An operation of `dtgpt/ops/` is defined once, in plain PyTorch: the definition is what its results mean, and what tests
hold kernels against. A kernel may serve in its place where it is faster and equal up to rounding. The core knows none:
capabilities name them at the seam `kernels`, by the operation, and their modules are imported when an operation first
meets a tensor that a kernel could serve. A run in fp32 on a CPU imports none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from dtgpt.util import seams
from dtgpt.util.torch_private import constant_result


class Kernel(NamedTuple):
    """What may serve an operation in place of its definition."""

    name: str
    serves: Callable[..., bool]  # of the operation's arguments; on the host alone, in a fraction of a microsecond
    run: Callable[..., Any]  # with the operation's arguments
    why_not: Callable[[torch.device], str | None]  # why it serves nothing on a device, in words; None: it does
    when: str  # what it is taken for, in words
    kept: tuple[OpOverload, ...] = ()  # operations of PyTorch whose outputs recomputation may keep


class Operation:
    """A function of tensors, the first of which decides by its device what serves.

    Kernels are asked in order of preference; where none serves, the definition answers.
    """

    def __init__(self, name: str, definition: Callable[..., Any], formula: str):
        """name: that of the seam. formula: what is computed and where it is from, in words."""
        self.name, self.definition, self.formula = name, definition, formula
        self.kernels: list[Kernel] = []  # filled by `load_kernels`, before the first tensor that one could serve
        OPERATIONS[name] = self

    def __call__(self, x: Tensor, *others: Any) -> Any:
        """Return what is computed of the arguments."""
        # This is on the way of each operation of a step, so that no function is called that need not be.
        # 16 bits on a CPU: there a definition may keep wider copies for backward than a kernel does.
        if (not x.is_cpu or x.dtype.itemsize == 2) and load_kernels(self.name):
            for kernel in self.kernels:
                if kernel.serves(x, *others):
                    return kernel.run(x, *others)
        return self.definition(x, *others)


OPERATIONS: dict[str, Operation] = {}  # by name, those of the modules that are imported
_loaded: set[str] = set()


@constant_result  # Dynamo cannot trace an import
def load_kernels(name: str) -> bool:
    """Import the kernels of an operation, if this was not done before, and return True."""
    if name not in _loaded:
        added = [each.parts["kernels"] for each in seams.capabilities()]
        places = [kernels[name] for kernels in added if name in kernels]
        OPERATIONS[name].kernels[:] = [kernel for place in places for kernel in seams.load(place)]
        _loaded.add(name)
    return True


_apart = False


def is_apart() -> bool:
    """Return whether `split_backward` is in effect."""
    return _apart


@contextmanager
def split_backward() -> Iterator[None]:
    """Leave gradients of parameters to PyTorch's own ops while the context lasts.

    A pipeline schedule that splits backward computes those gradients separately, which torch 2.11 cannot do for an
    autograd function written in Python.
    """
    global _apart
    _apart = True
    try:
        yield
    finally:
        _apart = False
