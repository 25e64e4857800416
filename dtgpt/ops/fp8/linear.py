"""A linear map whose three products, y = x w^T, dx = dy w and dw = dy^T x, are of 8-bit floats.

All three factors are e4m3 (Micikevicius et al. 2022, section 3), by scales that do not depend on the plan
(`dtgpt.ops.fp8.sites`). Everything that is quantised is a 16-bit value. The bias is added to the 16-bit product,
and its gradient is the sum of gradients before they are quantised.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.fp8.parts import quantize_whole
from dtgpt.ops.fp8.product import product
from dtgpt.ops.fp8.quantize import quantize, quantize_and_sum
from dtgpt.ops.fp8.sites import FORWARD, GRADIENT, Site, Sites
from dtgpt.ops.linear import linear
from dtgpt.ops.local_tensors import Parts
from dtgpt.ops.operation import is_apart


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites, into: Parts | None = None, out: Parts | None = None
) -> Tensor:
    """Return x w^T + bias `[.., out]`. x: `[.., in]`; weight: `[out, in]`; bias: `[out]` or None; local tensors of one
    16-bit dtype. While the scales are not known the product is of 16 bits, and a training step observes its values.

    into, out: where ranks have cut the weight by its outputs or by its inputs, how x or the result lies on them, while
    scales are known and no schedule splits backward. A result that is summed has no bias."""
    if not sites.quantise:
        return _observed(x, weight, bias, sites) if sites.record else linear(x, weight, bias)
    if is_apart():
        return _apart(x, weight, bias, sites)
    return _Linear.apply(x, weight, bias, sites, sites.record, into, out)


def _observed(x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites) -> Tensor:
    for value, site in ((x, sites.input), (weight, sites.weight)):
        record_amax(value, site)
    return _Gradient.apply(linear(x, weight, bias), sites.gradient, True, False)


def _apart(x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites) -> Tensor:
    """Return the product of the rounded values by PyTorch's own operation, which `split_backward` can cut in two."""
    record = sites.record
    y = F.linear(
        _rounded_straight_through(x, sites.input, record), _rounded_straight_through(weight, sites.weight, record)
    )
    y = _Gradient.apply(y, sites.gradient, record, True)
    return y if bias is None else y + bias


def record_amax(x: Tensor, site: Site) -> None:
    """Raise the amax of the site to that of x."""
    quantize(x.detach(), site.scale, FORWARD, site.amax, rows=False, columns=False)


def _rounded(x: Tensor, site: Site, dtype: torch.dtype, record: bool) -> Tensor:
    """Return x as 8 bits hold it, in the shape and dtype of x."""
    q, _ = quantize(x.detach(), site.scale, dtype, site.amax if record else None, rows=True, columns=False)
    return (q.float() * site.inverse).to(x.dtype).view_as(x)


def _rounded_straight_through(x: Tensor, site: Site, record: bool) -> Tensor:
    """Return x as 8 bits hold it, with the gradient of the identity, from PyTorch's own operations."""
    return _rounded(x, site, FORWARD, record) + (x - x.detach())


class _Gradient(torch.autograd.Function):
    """The identity, whose gradient is recorded, and rounded to 8 bits where asked for."""

    @staticmethod
    def forward(ctx, y: Tensor, site: Site, record: bool, quantise: bool) -> Tensor:
        ctx.site, ctx.record, ctx.quantise = site, record, quantise
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.quantise:
            grad = _rounded(grad, ctx.site, GRADIENT, ctx.record)
        elif ctx.record:
            record_amax(grad, ctx.site)
        return grad, None, None, None


def quantized_weight(weight: Tensor, site: Site, record: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the weight in 8 bits, and what `transposed_weight` needs: with `keep` the transposed weight in 8 bits,
    otherwise the weight itself, so that `fully_shard` may free what it all-gathered."""
    q, q_t = quantize(weight, site.scale, FORWARD, site.amax if record else None, rows=True, columns=keep)
    return q, q_t if keep else weight


def transposed_weight(kept: Tensor, site: Site) -> Tensor:
    """Return the transposed weight in 8 bits from what `quantized_weight` kept of it."""
    if kept.dtype == FORWARD:
        return kept
    return quantize(kept, site.scale, FORWARD, None, rows=False, columns=True)[1]


class _Linear(torch.autograd.Function):
    """Forward keeps the transposed 8-bit copy of the input, and the weight as `quantized_weight` says."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sites: Sites,
        record: bool,
        into: Parts | None,
        out: Parts | None,
    ) -> Tensor:
        first, second = sites.input, sites.weight
        xq, xq_t, shape = quantize_whole(x, first, FORWARD, first.amax if record else None, record, into)
        wq, kept = quantized_weight(weight, second, record, record and sites.keeps_weight(xq, weight))
        y = product(xq, wq, first.inverse, second.inverse, dtype=x.dtype, bias=bias)
        ctx.save_for_backward(xq_t, kept)
        ctx.sites, ctx.has_bias, ctx.into, ctx.out = sites, bias is not None, into, out
        y = y.unflatten(0, shape[:-1])
        return y if out is None else out.sum(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        xq_t, kept = ctx.saved_tensors
        first, second, third = ctx.sites.input, ctx.sites.weight, ctx.sites.gradient
        shape, d_bias = grad.shape, None
        if ctx.has_bias:
            gq, gq_t, d_bias = quantize_and_sum(grad, third.scale, GRADIENT, third.amax, rows=True, columns=True)
        else:
            gq, gq_t, shape = quantize_whole(grad, third, GRADIENT, third.amax, True, ctx.out)
        wq_t = transposed_weight(kept, second)
        dx = product(gq, wq_t, third.inverse, second.inverse, dtype=grad.dtype)
        dw = product(gq_t, xq_t, third.inverse, first.inverse, dtype=grad.dtype)
        dx = dx.unflatten(0, shape[:-1])
        return dx if ctx.into is None else ctx.into.sum(dx), dw, d_bias, None, None, None, None
