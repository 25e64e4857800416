"""Linear maps x w^T + bias.

Results do not depend on the number of rows: not on a GPU either, where kernels see to it, so that a prompt that is read
in one pass and a token that is decoded alone have the same bits.

Sharding rule: x may be sharded by rows; a weight cut by outputs makes cut features, one cut by inputs addends.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.operation import Operation

_may_split = False


@contextmanager
def split_sums() -> Iterator[None]:
    """Let the sums of products of few rows be split, which is faster, with other last bits, while the context lasts."""
    global _may_split
    before, _may_split = _may_split, True
    try:
        yield
    finally:
        _may_split = before


def may_split() -> bool:
    """Return whether `split_sums` is in effect."""
    return _may_split


# x, weight, bias: x w^T + bias `[.., out]` of x `[.., in]`, weight `[out, in]` and bias `[out]` or None, of one dtype.
linear = Operation("linear", F.linear, "x w^T + bias")


def _linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=memory) if bias is None else torch.addmm(bias, x, weight.t(), out=memory)


linear_into = Operation("linear_into", _linear_into, "x w^T + bias, in the memory given where nothing else serves")
