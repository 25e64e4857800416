"""A linear map whose three products, y = x w^T, dx = dy w and dw = dy^T x, are of 8-bit floats.

Inputs and weights are e4m3, gradients e5m2 (Micikevicius et al. 2022, section 3), by scales that do not depend on the
plan (`dtgpt.ops.fp8.sites`). Everything that is quantised is a 16-bit value. The bias is added, and its gradient summed,
in 16 bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.fast import is_apart
from dtgpt.ops.fp8.reference import product, quantize, record_amax, rounded
from dtgpt.ops.fp8.sites import FORWARD, GRADIENT, Site, Sites
from dtgpt.ops.pointwise.bias import bias_gradient
from dtgpt.ops.pointwise.linear import linear


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites) -> Tensor:
    """Return x w^T + bias `[.., out]`. x: `[.., in]`; weight: `[out, in]`; bias: `[out]` or None; local tensors of one
    16-bit dtype. While the scales are not known the product is of 16 bits, and a training step observes its values."""
    if not sites.quantise:
        return _observed(x, weight, bias, sites) if sites.record else linear(x, weight, bias)
    if is_apart():
        return _apart(x, weight, bias, sites)
    return _Linear.apply(x, weight, bias, sites, sites.record)


def _observed(x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites) -> Tensor:
    with torch.no_grad():
        record_amax(x, sites.input.amax)
        record_amax(weight, sites.weight.amax)
    return _Gradient.apply(linear(x, weight, bias), sites.gradient, True, False)


def _apart(x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites) -> Tensor:
    """Return the product of the rounded values by PyTorch's own operation, which `split_backward` can cut in two."""
    x = _round_straight_through(x, sites.input, sites.record)
    weight = _round_straight_through(weight, sites.weight, sites.record)
    y = _Gradient.apply(F.linear(x, weight), sites.gradient, sites.record, True)
    return y if bias is None else y + bias


def _round_straight_through(x: Tensor, site: Site, record: bool) -> Tensor:
    """Return x as 8 bits hold it, with the gradient of the identity, from PyTorch's own operations."""
    with torch.no_grad():
        if record:
            record_amax(x, site.amax)
        value = rounded(x, site.scale, site.inverse, FORWARD)
    return value + (x - x.detach())


class _Gradient(torch.autograd.Function):
    """The identity, whose gradient is recorded, and rounded to 8 bits where asked for."""

    @staticmethod
    def forward(ctx, y: Tensor, site: Site, record: bool, quantise: bool) -> Tensor:
        ctx.site, ctx.record, ctx.quantise = site, record, quantise
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        site = ctx.site
        if ctx.record:
            record_amax(grad, site.amax)
        if ctx.quantise:
            grad = rounded(grad, site.scale, site.inverse, GRADIENT)
        return grad, None, None, None


class _Linear(torch.autograd.Function):
    """Forward keeps the transposed 8-bit copy of the input. Of the weight it keeps the 16-bit tensor itself, which
    backward quantises again, so that `fully_shard` may free what it all-gathered."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sites: Sites, record: bool) -> Tensor:
        first, second = sites.input, sites.weight
        amaxes = (first.amax, second.amax) if record else (None, None)
        xq, xq_t = quantize(x, first.scale, FORWARD, amaxes[0], rows=True, columns=record)
        wq, _ = quantize(weight, second.scale, FORWARD, amaxes[1], rows=True, columns=False)
        assert xq is not None and wq is not None
        y = product(xq, wq, first.inverse, second.inverse, fast=True, dtype=x.dtype).unflatten(0, x.shape[:-1])
        ctx.save_for_backward(xq_t, weight)
        ctx.sites, ctx.has_bias = sites, bias is not None
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        xq_t, weight = ctx.saved_tensors
        first, second, third = ctx.sites.input, ctx.sites.weight, ctx.sites.gradient
        gq, gq_t = quantize(grad, third.scale, GRADIENT, third.amax, rows=True, columns=True)
        _, wq_t = quantize(weight, second.scale, FORWARD, None, rows=False, columns=True)
        assert gq is not None and gq_t is not None and wq_t is not None
        dx = product(gq, wq_t, third.inverse, second.inverse, fast=False, dtype=grad.dtype)
        dw = product(gq_t, xq_t, third.inverse, first.inverse, fast=False, dtype=weight.dtype)
        db = bias_gradient(grad) if ctx.has_bias else None
        return dx.unflatten(0, grad.shape[:-1]), dw, db, None, None
