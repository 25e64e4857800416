"""How the copy engine of a Hopper GPU is told of a tensor."""

from typing import Any

from torch import Tensor


def described(x: Tensor, *block: int) -> Any:
    """Return a descriptor of x, read and written in blocks, such as `[rows, columns]` of a matrix."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # imported on first use, since it needs Triton

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
