"""An MLP whose six products are of 8-bit floats, with one pass over the data between its two matrices each way.

The activation and the gradient of its input exist in 8 bits only, in both orders. Every value is that of `fp8_linear`,
the activation, and `fp8_linear` again. Sharding rule: a first matrix cut by its outputs and a second one cut alike by
its inputs give an addend of the result, and one of the gradient of the input; `Parts` gather, in 8 bits, and
sum.
"""

import torch
from torch import Tensor

from dtgpt.ops.fp8.activation import activation_backward, activation_forward
from dtgpt.ops.fp8.fused import Name
from dtgpt.ops.fp8.linear import quantized_weight, transposed_weight
from dtgpt.ops.fp8.parts import quantize_whole
from dtgpt.ops.fp8.product import product
from dtgpt.ops.fp8.sites import FORWARD, GRADIENT, Sites
from dtgpt.ops.local_tensors import Parts


def fp8_mlp(
    x: Tensor,
    weight_1: Tensor,
    bias: Tensor | None,
    weight_2: Tensor,
    sites_1: Sites,
    sites_2: Sites,
    activation: Name,
    into: Parts | None = None,
    out: Parts | None = None,
) -> Tensor:
    """Return activation(x weight_1^T) weight_2^T `[.., out]`: "gelu" is gelu_tanh(u + bias), "swiglu" has no bias and
    pairs that lie as of `swiglu`. Raises ValueError for any other one.

    x: `[.., in]`; weight_1: `[F, in]`, or `[2 F, in]` without a bias; bias: `[F]`; weight_2: `[out, F]`; x and weights
    of one 16-bit dtype. The scales of both sites must be known. into, out: where ranks have cut the matrices, how
    x and the result lie on them.
    """
    if (activation, bias is not None) not in (("gelu", True), ("swiglu", False)):
        raise ValueError(
            f"no fused kernel computes the activation {activation} {'without' if bias is None else 'with'} a bias; "
            "compute it between the two matrices"
        )
    return _MLP.apply(x, weight_1, bias, weight_2, sites_1, sites_2, sites_1.record, into, out)


class _MLP(torch.autograd.Function):
    """Forward keeps transposed 8-bit copies of both inputs, the 16-bit input of the activation, and the weights as
    `quantized_weight` says."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight_1: Tensor,
        bias: Tensor | None,
        weight_2: Tensor,
        one: Sites,
        two: Sites,
        record: bool,
        into: Parts | None,
        out: Parts | None,
    ) -> Tensor:
        cells = [site.amax if record else None for site in (one.input, two.input)]
        xq, xq_t, shape = quantize_whole(x, one.input, FORWARD, cells[0], record, into)
        wq, kept_1 = quantized_weight(weight_1, one.weight, record, record and one.keeps_weight(xq, weight_1))
        u = product(xq, wq, one.input.inverse, one.weight.inverse, dtype=x.dtype)
        hq, hq_t = activation_forward(u, bias, two.input.scale, FORWARD, cells[1], record)
        wq, kept_2 = quantized_weight(weight_2, two.weight, record, record and two.keeps_weight(hq, weight_2))
        y = product(hq, wq, two.input.inverse, two.weight.inverse, dtype=x.dtype)
        ctx.save_for_backward(xq_t, hq_t, u, bias, kept_1, kept_2)
        ctx.sites, ctx.ends = (one, two), (into, out)
        y = y.unflatten(0, shape[:-1])
        return y if out is None else out.sum(y)

    @staticmethod
    def backward(ctx, dy: Tensor):
        xq_t, hq_t, u, bias, kept_1, kept_2 = ctx.saved_tensors
        one, two = ctx.sites
        into, out = ctx.ends
        g = two.gradient
        gq, gq_t, shape = quantize_whole(dy, g, GRADIENT, g.amax, True, out)
        wq_t = transposed_weight(kept_2, two.weight)
        dh = product(gq, wq_t, g.inverse, two.weight.inverse, dtype=u.dtype)
        d_weight_2 = product(gq_t, hq_t, g.inverse, two.input.inverse, dtype=dy.dtype)
        g = one.gradient
        gq, gq_t, d_bias = activation_backward(dh, u, bias, g.scale, GRADIENT, g.amax)
        wq_t = transposed_weight(kept_1, one.weight)
        dx = product(gq, wq_t, g.inverse, one.weight.inverse, dtype=u.dtype)
        d_weight_1 = product(gq_t, xq_t, g.inverse, one.input.inverse, dtype=dy.dtype)
        d_bias = None if bias is None else d_bias
        dx = dx.unflatten(0, shape[:-1])
        dx = dx if into is None else into.sum(dx)
        return dx, d_weight_1, d_bias, d_weight_2, None, None, None, None, None
