"""How the copy engine of a Hopper GPU is told of a tensor."""

from typing import Any

from torch import Tensor

MOST_ROWS = 1 << 30  # of a matrix of which a part of the rows is written


def described(x: Tensor, *block: int) -> Any:
    """Return a descriptor of x, read and written in blocks, such as `[rows, columns]` of a matrix."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # imported on first use, since it needs Triton

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def described_rows(x: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of a contiguous matrix by which a block may write the rows before any `end` alone, at
    `[MOST_ROWS, end, MOST_ROWS - end + row, column]`: rows from `end` on are out of its bounds. The place in memory is
    right since addresses have 64 bits, and 2^64 more is the same one."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # imported on first use, since it needs Triton

    size, any_number = x.shape[1], (1 << 31) - 1
    shape, strides = [any_number, any_number, MOST_ROWS, size], [(1 << 34) - size, size, size, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, columns])
