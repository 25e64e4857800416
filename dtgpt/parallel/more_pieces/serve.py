"""What serves sums of pieces of experts on a GPU, and when. As in `serve`, no condition depends on how many pieces a
rank has. Kernels that sum K in one chain have the same bits for any columns and strides."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.experts.products import grouped_outer, grouped_product
from dtgpt.ops.kernels.devices import has_hopper, has_triton, why_below, why_no_triton
from dtgpt.ops.kernels.experts import ALIGNED, SERVED
from dtgpt.ops.operation import Kernel
from dtgpt.parallel.exact_tp.products import operand
from dtgpt.parallel.more_pieces.stacks import addends
from dtgpt.util.shared.gpu_limits import HOPPER


def kernels():
    from dtgpt.parallel.more_pieces import stack_kernels  # imported on first use, since it needs Triton

    return stack_kernels


def _alike(x: Tensor, *sizes: int) -> bool:
    """Return whether one kernel serves pieces with dimensions of these sizes, and several of them beside each other."""
    if not has_triton(x) or x.dtype not in SERVED:
        return False
    return x.dtype != torch.bfloat16 or not has_hopper(x.device) or all(size % ALIGNED == 0 for size in sizes)


def _columns(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> bool:
    return _alike(x, x.shape[1], weight.shape[2 if by_inputs else 1] // count)


def _all_columns(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> Tensor:
    return grouped_product(x, weight.mT if by_inputs else weight, ends)


def _addends(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> bool:
    return _alike(x, x.shape[1] // count, weight.shape[1 if by_inputs else 2])


def _in_registers(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> bool:
    hopper = has_triton(x) and x.dtype == torch.bfloat16 and has_hopper(x.device)
    terms, columns = x.shape[1] // count, weight.shape[1 if by_inputs else 2]
    return hopper and len(x) > 0 and columns % ALIGNED == 0 and kernels().inner_of(terms) > 0


def _gradient(dy: Tensor, x: Tensor, ends: Tensor, count: int, by_inputs: bool) -> bool:
    cut, whole = (x, dy) if by_inputs else (dy, x)
    return _alike(dy, cut.shape[1] // count, whole.shape[1])


def _all_gradients(dy: Tensor, x: Tensor, ends: Tensor, *_: Any) -> Tensor:
    return grouped_outer(operand(dy), operand(x), ends)


WHEN = f"in bf16 on Hopper GPUs: pieces of {ALIGNED} k numbers"
ADDENDS = (
    Kernel(
        "Triton: pieces and tree in registers",
        _in_registers,
        lambda *x: kernels().stack_tree(*x),
        partial(why_below, HOPPER),
        "bf16, pieces of 32 k terms",
    ),
    Kernel("grouped products, pieces in place", _addends, partial(addends, Tensor.chunk), why_no_triton, WHEN),
)
COLUMNS = (Kernel("a grouped product, all columns at once", _columns, _all_columns, why_no_triton, WHEN),)
WEIGHT_GRADIENT = (Kernel("a grouped product, all pieces at once", _gradient, _all_gradients, why_no_triton, WHEN),)
