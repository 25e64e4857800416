"""Linear maps whose matrix is of 4 bits and has no gradient.

The matrix is made anew in the type of the input in each pass, and freed behind the product: between forward and
backward its 4 bits alone are kept.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.nf4.form import Nf4, Place
from dtgpt.ops.nf4.quantise import dequantise


def nf4_linear(x: Tensor, matrix: Nf4, place: Place, bias: Tensor | None) -> Tensor:
    """Return x w^T + bias `[.., out]` of x `[.., in]`, w being the matrix in x's dtype. place: of a part of it."""
    return _Product.apply(x, bias, *matrix, place)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, groups: Tensor, place: Place
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, groups)
        ctx.place = place
        return F.linear(x, dequantise(Nf4(codes, scales, groups), place, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        dx = dy @ dequantise(Nf4(*ctx.saved_tensors), ctx.place, dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None
