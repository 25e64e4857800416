"""Kernels on a CPU: which serve there, and Triton's interpreter, which runs them where TRITON_INTERPRET=1."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from dtgpt.ops.operation import Kernel, Operation, load_kernels
from tests.support.fresh import run_fresh

# The package of kernels is a capability: the core is tested without it.
needs_triton = pytest.mark.skipif(
    not all(map(find_spec, ("triton", "dtgpt.ops.kernels"))), reason="needs triton, and dtgpt.ops.kernels"
)


def run_interpreted(code: str) -> None:
    """Run code of tests in a process of its own whose kernels Triton interprets."""
    root = Path(__file__).parents[2]
    begin = "from tests.support.interpreter import let_kernels_loop; let_kernels_loop()\n"
    done = run_fresh(["-c", begin + code], root, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]


@contextmanager
def chosen_by(choose: Callable[..., Kernel | None]) -> Iterator[None]:
    """Operations are served by what `choose` returns, None for the definition."""

    def call(self, x, *others):
        kernel = choose(self, x, *others)
        return self.definition(x, *others) if kernel is None else kernel.run(x, *others)

    with mock.patch.object(Operation, "__call__", call):
        yield


def chosen(self: Operation, x: Tensor, *others) -> Kernel | None:
    """What serves an operation where no test says otherwise."""
    if x.is_cpu and x.dtype.itemsize != 2:
        return None
    load_kernels(self.name)
    return next((kernel for kernel in self.kernels if kernel.serves(x, *others)), None)


@contextmanager
def first_kernels_of(*names: str, where: Callable[[Tensor], bool] = lambda x: True) -> Iterator[None]:
    """Operations of these names take their first kernel, whatever the device, for the tensors of which `where` says
    so."""

    def first(self, x, *others):
        if self.name not in names or not where(x):
            return chosen(self, x, *others)
        load_kernels(self.name)
        return self.kernels[0]

    with chosen_by(first):
        yield


@contextmanager
def kernels_asked_of(*names: str) -> Iterator[None]:
    """Operations of these names ask their kernels on a CPU in fp32, too."""

    def ask(self, x, *others):
        if self.name not in names:
            return chosen(self, x, *others)
        load_kernels(self.name)
        return next((kernel for kernel in self.kernels if kernel.serves(x, *others)), None)

    with chosen_by(ask):
        yield


@contextmanager
def definitions_of(*names: str) -> Iterator[None]:
    """Operations of these names take their definition."""

    def none(self, x, *others):
        return None if self.name in names else chosen(self, x, *others)

    with chosen_by(none):
        yield


def let_kernels_loop() -> None:
    """Let kernels have loops: NumPy from 2.4 on makes no number of an array of one element, as the interpreter expects
    of their bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
