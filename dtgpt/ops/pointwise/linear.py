"""A linear map whose results do not depend on the number of rows, and whose bias gradient is a two-stage column sum.

cuBLAS splits the dimension that it sums over, K, where there are few rows: then the order of the sums, and the last
bits, would differ from those of a larger batch. Products of few rows therefore sum K in one chain of tensor-core
operations, which has the bits of cuBLAS's whole sums (`benchmarks/exact.py` compares them).

PyTorch's own kernel for the gradient of a bias is far from the memory's bandwidth at GPT-2's sizes. The matrix products
of many rows stay `aten` operations, visible to the compiler and to DTensor: forward adds the bias in the product's
epilogue, backward computes dx = dy w and dw = dy^T x. Sharding rule: those of `F.linear` and of
`dtgpt.ops.pointwise.bias`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.fast import may_fuse
from dtgpt.ops.local_linear import on_local_tensors
from dtgpt.ops.pointwise.bias import bias_gradient
from dtgpt.util.torch_private import is_dtensor

FEW = 512  # rows up to which cuBLAS was seen to split K

_may_split = False


@contextmanager
def split_sums() -> Iterator[None]:
    """Let cuBLAS compute products of few rows, too, while the context lasts: faster, with other last bits."""
    global _may_split
    before, _may_split = _may_split, True
    try:
        yield
    finally:
        _may_split = before


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x w^T + bias `[.., out]`. x: `[.., in]`; weight: `[out, in]`; bias: `[out]` or None; all of one dtype."""
    splits = bias is None and may_fuse(x) and x.dtype == torch.float32  # cuBLAS would, with any number of rows
    if is_dtensor(weight) and (splits or _has_few_rows(x)):
        return on_local_tensors(linear, x, weight, bias)
    if takes_chain(x, weight):
        return _chain(x, weight, bias)
    if splits:
        return F.linear(x, weight, weight.new_zeros(len(weight)))  # with a bias it does not split K
    if bias is None or not may_fuse(x):
        return F.linear(x, weight, bias)
    return linear_by_column_sum(x, weight, bias)


def takes_chain(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` sums K in one chain of its own: for few rows on a GPU. Where tensor parallelism has cut
    the weight, this is about the local tensors."""
    return _has_few_rows(x) and not is_dtensor(weight)


def _has_few_rows(x: Tensor) -> bool:
    return may_fuse(x) and 0 < x.numel() // max(x.shape[-1], 1) <= FEW and not _may_split


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
    from dtgpt.ops.decode.blocks import product  # imported on first use, since it needs Triton

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
