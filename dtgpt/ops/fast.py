"""Whether an op takes its fast path."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

TRITON = importlib.util.find_spec("triton") is not None
_apart = False


def has_triton(x: Tensor) -> bool:
    """Whether Triton's kernels can work on `x`."""
    return TRITON and x.is_cuda


def may_fuse(x: Tensor) -> bool:
    """`has_triton`, for an op whose backward makes gradients of parameters along with that of `x`."""
    return has_triton(x) and not _apart


def is_apart() -> bool:
    return _apart


@contextmanager
def parameters_apart() -> Iterator[None]:
    """Here no op of ours makes gradients of parameters: PyTorch's own do. A schedule that cuts backward in two computes
    those gradients by themselves, which torch 2.11 cannot do of a Python autograd function."""
    global _apart
    _apart = True
    try:
        yield
    finally:
        _apart = False
