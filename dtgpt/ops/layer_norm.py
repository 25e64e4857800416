"""LayerNorm (Ba, Kiros, Hinton 2016) and the residual addition before it: bias, dropout, sum and norm in one pass.

Reference and test oracle: `layer_norm_reference`, `residual_reference`, `residual_norm_reference`. Fast path: one
Triton kernel over rows each way, fp32 inside. Backward reads each activation once: it computes the normalised values
again from the rounded sum and two numbers per row, draws the dropout mask again, and sums the gradients of weight, bias
and branch bias in two stages without atomics, so that they are the same in every run.

Sharding rule: rows (samples and positions) may be cut, the hidden dimension may not. Under a cut of the positions
`start` is that of the shard; gradients of weight, bias and branch bias are then partial sums.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental import register_sharding

from dtgpt.ops.dropout import dropout
from dtgpt.ops.fast import may_fuse
from dtgpt.ops.residual import WHOLE, check_site, cuts, given, kernels, like, residual_reference, whole_bias


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def residual_norm_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, layer_norm_reference(total, weight, bias, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x `[.., H]`, weight and bias `[H]` in x's dtype or fp32 -> `[.., H]` in x's dtype."""
    if not may_fuse(x):
        return layer_norm_reference(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps)[0]


def norm_and_pass(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, `layer_norm` of x), for a residual stream that goes on past its norm: backward adds both gradients of x while
    it makes one of them."""
    if not may_fuse(x):
        return x, layer_norm_reference(x, weight, bias, eps)
    return _NormAndPass.apply(x, weight, bias, eps)[:2]


def residual_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    key: Tensor | None, p: float, start: Sequence[int] = (0, 0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sum, normed) `[B, T, H]` each: sum = x + dropout(branch + branch_bias), rounded to x's dtype, and its LayerNorm.

    x, branch: `[B, T, H]` of one dtype; key: int64 `[B, 2]`, or None for no dropout; start: the global position and
    column of the first element within a sample. ValueError where the column is no multiple of eight.
    """
    key, branch_bias = check_site(key, p, start), whole_bias(x, branch, branch_bias)
    if not may_fuse(x):
        return residual_norm_reference(x, branch, branch_bias, weight, bias, eps, key, p, start)
    return _residual_norm(x, branch, branch_bias, weight, bias, eps, key, p, start)[:2]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _statistics(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normed `[.., H]`, mean `[..]`, rstd `[..]`)."""
    variance, mean = torch.var_mean(x.to(_wide(x)), dim=-1, correction=0)
    return layer_norm_reference(x, weight, bias, eps), mean, torch.rsqrt(variance + eps)


def _like_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *(x.new_empty(x.shape[:-1], dtype=_wide(x)) for _ in range(2))


@torch.library.custom_op("dtgpt::layer_norm", mutates_args=(), device_types="cpu")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _statistics(x, weight, bias, eps)


@_layer_norm.register_kernel("cuda")
def _(x, weight, bias, eps):
    return kernels().norm_forward(x, None, None, weight, bias, eps, None, 0.0, (0, 0))[1:]


_layer_norm.register_fake(lambda x, *_: _like_statistics(x))


@torch.library.custom_op("dtgpt::residual_norm", mutates_args=(), device_types="cpu")
def _residual_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(sum, normed, mean, rstd)."""
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, *_statistics(total, weight, bias, eps)


_residual_norm.register_kernel("cuda", lambda *inputs: kernels().norm_forward(*inputs))
_residual_norm.register_fake(lambda x, *_: (like(x, x), *_like_statistics(x)))


@torch.library.custom_op("dtgpt::norm_backward", mutates_args=(), device_types="cpu")
def _norm_backward(
    d_normed: Tensor, d_sum: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, d_branch, dweight, dbias, d_branch_bias); d_branch is empty without a key (it is dx), d_branch_bias without
    a branch bias."""
    wide, rstd = mean.dtype, rstd.unsqueeze(-1)
    xhat = (total.to(wide) - mean.unsqueeze(-1)) * rstd
    dy = d_normed.to(wide)
    weighted = dy * weight.to(wide)
    common, along = (t.mean(-1, keepdim=True) for t in (weighted, weighted * xhat))
    dx = rstd * (weighted - common - xhat * along)
    dx = dx if d_sum is None else dx + d_sum
    d_branch = dx if key is None else dropout(dx, key, p, start)
    dweight, dbias, d_branch_bias = (t.flatten(0, -2).sum(0) for t in (dy * xhat, dy, d_branch))
    return (
        dx.to(total.dtype, copy=True),
        total.new_empty(0) if key is None else d_branch.to(total.dtype, copy=True),
        dweight.to(weight.dtype),
        dbias.to(weight.dtype),
        total.new_empty(0) if branch_bias is None else d_branch_bias.to(branch_bias.dtype),
    )


@_norm_backward.register_kernel("cuda")
def _(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start):
    made = kernels().norm_backward(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start)
    return tuple(total.new_empty(0) if tensor is None else tensor for tensor in made)


@_norm_backward.register_fake
def _(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start):
    d_branch = like(None if key is None else total, total)
    return like(total, total), d_branch, like(weight, total), like(weight, total), like(branch_bias, total)


def _save_layer_norm(ctx, inputs, output) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, *output[1:], weight)
    ctx.set_materialize_grads(False)  # the statistics have none


def _differentiate_layer_norm(ctx, dy, *_):
    dx, _, dweight, dbias, _ = _norm_backward(dy, None, *ctx.saved_tensors, None, None, 0.0, (0, 0))
    return dx, dweight, dbias, None


def _save_residual_norm(ctx, inputs, output) -> None:
    _, _, branch_bias, weight, _, _, key, ctx.p, ctx.start = inputs
    total, _, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, weight, branch_bias, key)
    ctx.set_materialize_grads(False)


def _differentiate_residual_norm(ctx, d_sum, d_normed, *_):
    saved = ctx.saved_tensors  # once: recomputation gives them a single time
    total, _, _, _, branch_bias, key = saved
    d_normed = torch.zeros_like(total) if d_normed is None else d_normed
    dx, d_branch, dweight, dbias, d_branch_bias = _norm_backward(d_normed, d_sum, *saved, ctx.p, ctx.start)
    d_branch_bias = None if branch_bias is None else d_branch_bias
    return dx, dx if key is None else d_branch, d_branch_bias, dweight, dbias, None, None, None, None


class _NormAndPass(torch.autograd.Function):
    """No custom op may return its input, so that this is a function around them."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.view_as(x), *_layer_norm(x, weight, bias, eps)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, _, _ = inputs
        _, _, mean, rstd = output
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_x, d_normed, *_):
        if d_normed is None:
            return d_x, None, None, None
        dx, _, dweight, dbias, _ = _norm_backward(d_normed, d_x, *ctx.saved_tensors, None, None, 0.0, (0, 0))
        return dx, dweight, dbias, None


_layer_norm.register_autograd(_differentiate_layer_norm, setup_context=_save_layer_norm)
_residual_norm.register_autograd(_differentiate_residual_norm, setup_context=_save_residual_norm)


@register_sharding(torch.ops.dtgpt.layer_norm.default)
def _(x, weight, bias, eps):
    return [([rows] * 3, [rows, WHOLE, WHOLE, None]) for rows, _, _ in cuts(x.ndim)]


@register_sharding(torch.ops.dtgpt.residual_norm.default)
def _(x, branch, branch_bias, weight, bias, eps, key, p, start):
    return [
        ([rows] * 4, [rows, rows, given(branch_bias, WHOLE), WHOLE, WHOLE, None, given(key, keys), None, None])
        for rows, keys, _ in cuts(x.ndim)
    ]


@register_sharding(torch.ops.dtgpt.norm_backward.default)
def _(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start):
    def rule(rows, keys, sums):
        inputs = [
            rows,
            given(d_sum, rows),
            rows,
            rows,
            rows,
            WHOLE,
            given(branch_bias, WHOLE),
            given(key, keys),
            None,
            None,
        ]
        return [rows, given(key, rows, WHOLE), sums, sums, given(branch_bias, sums, WHOLE)], inputs

    return [rule(*cut) for cut in cuts(total.ndim)]
