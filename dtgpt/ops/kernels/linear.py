"""What serves the linear map: products whose bits do not depend on the number of rows, and a bias gradient by sums in
two stages.

cuBLAS splits the dimension that it sums over, K, where there are few rows: then the order of the sums, and the last
bits, would differ from those of a larger batch. Products of few rows therefore sum K in one chain of tensor-core
operations, which has the bits of cuBLAS's whole sums (`benchmarks/exact.py` compares them). Of few columns, as routers
of experts have in fp32, cuBLAS may split K with any number of rows: they have the chain then, too.

PyTorch's own kernel for the gradient of a bias is far from the memory's bandwidth at GPT-2's sizes. The matrix products
of many rows stay `aten` operations, visible to the compiler and to DTensor: forward adds the bias in the product's
epilogue, backward computes dx = dy w and dw = dy^T x. Sharding rule: those of `F.linear` and of
`dtgpt.ops.kernels.bias`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.kernels.bias import bias_gradient, register_rule
from dtgpt.ops.kernels.devices import may_fuse, why_no_triton
from dtgpt.ops.kernels.torch_private import spare_compiler
from dtgpt.ops.linear import linear, may_split
from dtgpt.ops.local_tensors import on_local_tensors
from dtgpt.ops.operation import Kernel
from dtgpt.util.torch_private import is_dtensor

FEW = 512  # rows up to which cuBLAS was seen to split K
NARROW, NARROW_WIDE = 16, 256  # columns up to which products have one chain for any number of rows; in fp32


# What tells most quickly is asked first: this is on the way of each operation of a step.
def _takes_chain(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> bool:
    if not x.numel() or may_split() or not may_fuse(x):
        return False
    narrow = bias is None and len(weight) <= (NARROW_WIDE if x.dtype == torch.float32 else NARROW)
    return narrow or x.numel() // x.shape[-1] <= FEW


def _splits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether cuBLAS would split K with any number of rows."""
    return bias is None and x.dtype == torch.float32 and may_fuse(x)


def linear_by_column_sum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `F.linear`, with a bias gradient by `bias_gradient`."""
    return _BiasGradient.apply(F.linear(x, weight, bias.detach()), bias)


class _BiasGradient(torch.autograd.Function):
    """Return `y`, to which the detached bias has been added already, and differentiate it in the bias."""

    @staticmethod
    def forward(y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, bias_gradient(grad) if ctx.needs_input_grad[1] else None


@torch.library.custom_op("dtgpt::chain_product", mutates_args=(), device_types="cuda")
def _chain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from dtgpt.ops.kernels.decode.blocks import product  # imported on first use, since it needs Triton

    made = product(x.flatten(0, -2).contiguous(), weight.contiguous(), bias, "plain", exact=True)
    return made.view(*x.shape[:-1], len(weight))


@_chain.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx, grad: Tensor):
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad
    dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if wants_weight else None
    return grad @ weight if wants_x else None, dweight, bias_gradient(grad) if wants_bias else None


_chain.register_autograd(_differentiate, setup_context=_save)


def _of_dtensors(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not is_dtensor(x):
        raise ValueError("the input of a weight that is a DTensor must be one, too")
    if _splits(x, weight, bias) or _takes_chain(x, weight, bias):
        return on_local_tensors(linear, x, weight, bias)
    if bias is None:
        return F.linear(x, weight, bias)
    register_rule()
    return linear_by_column_sum(x, weight, bias)


def _by_whole_sums(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    return F.linear(x, weight, weight.new_zeros(len(weight)))  # with a bias cuBLAS does not split K


CHAIN_NAME = "Triton: one chain of sums"
CHAIN = "of up to 512 rows on a GPU, or of few columns, where cuBLAS would split the sums"
LINEAR = (
    Kernel(
        "one of these, of local tensors where it is not PyTorch's",
        lambda x, weight, bias: type(weight) is not Tensor and is_dtensor(weight) and may_fuse(x),
        _of_dtensors,
        why_no_triton,
        "where tensor parallelism has cut the weight",
    ),
    Kernel(CHAIN_NAME, _takes_chain, _chain, why_no_triton, CHAIN),
    Kernel(
        "cuBLAS, with a bias of zeros",
        _splits,
        _by_whole_sums,
        why_no_triton,
        "in fp32 without a bias, where cuBLAS would split the sums",
    ),
    Kernel(
        "cuBLAS, with Triton for the gradient of the bias",
        lambda x, weight, bias: bias is not None and may_fuse(x),
        linear_by_column_sum,
        why_no_triton,
        "with a bias, of more rows",
    ),
)
LINEAR_INTO = (
    Kernel(
        CHAIN_NAME,
        _takes_chain,
        lambda x, weight, bias, memory: _chain(x, weight, bias),
        why_no_triton,
        CHAIN,
    ),
)
spare_compiler()
