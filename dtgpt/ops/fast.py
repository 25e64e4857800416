"""Whether an op takes its fast path."""

import importlib.util

from torch import Tensor

TRITON = importlib.util.find_spec("triton") is not None


def has_triton(x: Tensor) -> bool:
    """Whether Triton's kernels can work on `x`."""
    return TRITON and x.is_cuda
