"""RMSNorm (Zhang and Sennrich 2019) and the residual addition before it: dropout, sum and norm in one pass.

Reference and test oracle: `rms_norm_reference`, `residual_rms_norm_reference`. Fast path: the Triton kernels of
LayerNorm without mean and bias, fp32 inside. Backward reads each activation once: it computes the normalised values
again from the rounded sum and one number per row, draws the dropout mask again, and sums the gradient of the weight in
two stages without atomics, so that it is the same in every run.

Sharding rule: that of `dtgpt.ops.norm.residual`; the gradient of the weight is a partial sum, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.fast import takes_custom_op
from dtgpt.ops.norm.residual import check_site, kernels, like, residual_reference, whole_bias
from dtgpt.ops.random.dropout import dropout


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, computed in fp32 at least and rounded once to x's dtype: the test
    oracle."""
    return _with_statistic(x, weight, eps)[0]


def residual_rms_norm_reference(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, key: Tensor | None, p: float, start: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return what `residual_rms_norm` does, in plain torch: the test oracle."""
    total = residual_reference(x, branch, None, key, p, start)
    return total, rms_norm_reference(total, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x `[.., H]` to `[.., H]` in x's dtype; weight: `[H]` in x's dtype or fp32."""
    return rms_norm_and_pass(x, weight, eps)[1]


def rms_norm_and_pass(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, `rms_norm` of x), for a residual stream that also bypasses its norm.

    Backward adds the two gradients of x in the pass that makes that of the norm.
    """
    if not takes_custom_op(x, has_parameters=True):
        return x, rms_norm_reference(x, weight, eps)
    return _RMSNormAndPass.apply(x, weight, eps)[:2]


def residual_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, key: Tensor | None, p: float, start: Sequence[int] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """Return (sum, normed), `[B, T, H]` each: x + dropout(branch), and its RMSNorm.

    weight: `[H]`; the other arguments, and errors raised, as of `residual`.
    """
    key, _ = check_site(key, p, start), whole_bias(x, branch, None)
    if not takes_custom_op(x, has_parameters=True):
        return residual_rms_norm_reference(x, branch, weight, eps, key, p, start)
    return _residual_rms_norm(x, branch, weight, eps, key, p, start)[:2]


def rms_norm_gradient(dy: Tensor, x: Tensor, rrms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx `[.., H]`, the gradient of the weight `[H]`), in plain torch and the dtype of rrms.

    rrms: `[..]`, the reciprocal root mean square of each row of x `[.., H]`.
    """
    dy, rrms = dy.to(rrms.dtype), rrms.unsqueeze(-1)
    xhat, weighted = x.to(rrms.dtype) * rrms, dy * weight.to(rrms.dtype)
    dx = rrms * (weighted - xhat * (weighted * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).flatten(0, -2).sum(0)


def reciprocal_root(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) `[..]` of each row of x `[.., H]`, in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.square().mean(-1) + eps)


def _with_statistic(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (normed `[.., H]`, reciprocal root mean square `[..]`)."""
    rrms = reciprocal_root(x, eps)
    return (x.to(rrms.dtype) * rrms.unsqueeze(-1) * weight.to(rrms.dtype)).to(x.dtype), rrms


def _like_statistic(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide)


def _forward(x, branch, weight, eps, key, p, start):
    """Launch the forward kernel. Return (sum or None without a branch, normed, reciprocal root mean square)."""
    launch = kernels().RMS_FORWARD
    total, normed, _, rrms = kernels().norm_forward(x, branch, None, weight, None, eps, key, p, start, launch)
    return total, normed, rrms


_rms_norm = torch.library.custom_op("dtgpt::rms_norm", _with_statistic, mutates_args=(), device_types="cpu")


@_rms_norm.register_kernel("cuda")
def _(x, weight, eps):
    _, normed, rrms = _forward(x, None, weight, eps, None, 0.0, (0, 0))
    return normed, rrms


_rms_norm.register_fake(lambda x, *_: _like_statistic(x))


@torch.library.custom_op("dtgpt::residual_rms_norm", mutates_args=(), device_types="cpu")
def _residual_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, key: Tensor | None, p: float, start: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum, normed, reciprocal root mean square)."""
    total = residual_reference(x, branch, None, key, p, start)
    return total, *_with_statistic(total, weight, eps)


_residual_rms_norm.register_kernel("cuda", lambda *inputs: _forward(*inputs))
_residual_rms_norm.register_fake(lambda x, *_: (like(x, x), *_like_statistic(x)))


@torch.library.custom_op("dtgpt::rms_norm_backward", mutates_args=(), device_types="cpu")
def _rms_norm_backward(
    d_normed: Tensor, d_sum: Tensor | None, total: Tensor, rrms: Tensor, weight: Tensor, key: Tensor | None, p: float,
    start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dx, d_branch, dweight); d_branch is empty without a key (it equals dx)."""
    dx, dweight = rms_norm_gradient(d_normed, total, rrms, weight)
    dx = dx if d_sum is None else dx + d_sum
    d_branch = total.new_empty(0) if key is None else dropout(dx, key, p, start).to(total.dtype, copy=True)
    return dx.to(total.dtype, copy=True), d_branch, dweight.to(weight.dtype)


@_rms_norm_backward.register_kernel("cuda")
def _(d_normed, d_sum, total, rrms, weight, key, p, start):
    launch = kernels().RMS_BACKWARD
    made = kernels().norm_backward(d_normed, d_sum, total, None, rrms, weight, None, key, p, start, launch)
    dx, d_branch, dweight, *_ = made
    return dx, total.new_empty(0) if d_branch is None else d_branch, dweight


@_rms_norm_backward.register_fake
def _(d_normed, d_sum, total, rrms, weight, key, p, start):
    return like(total, total), like(None if key is None else total, total), like(weight, total)


def _save(ctx, inputs, output) -> None:
    _, _, weight, _, key, ctx.p, ctx.start = inputs
    total, _, rrms = output
    ctx.save_for_backward(total, rrms, weight, key)
    ctx.set_materialize_grads(False)  # the statistic has no gradient


def _differentiate(ctx, d_sum, d_normed, _):
    saved = ctx.saved_tensors  # read once: recomputation frees saved tensors after the first access
    total, _, _, key = saved
    d_normed = torch.zeros_like(total) if d_normed is None else d_normed
    dx, d_branch, dweight = _rms_norm_backward(d_normed, d_sum, *saved, ctx.p, ctx.start)
    return dx, dx if key is None else d_branch, dweight, None, None, None, None


_residual_rms_norm.register_autograd(_differentiate, setup_context=_save)


class _RMSNormAndPass(torch.autograd.Function):
    """Differentiate `rms_norm_and_pass`: an autograd function, since a custom op may not return its input."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return x.view_as(x), *_rms_norm(x, weight, eps)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, _ = inputs
        _, _, rrms = output
        ctx.save_for_backward(x, rrms, weight)
        ctx.mark_non_differentiable(rrms)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_x, d_normed, _):
        if d_normed is None:
            return d_x, None, None
        dx, _, dweight = _rms_norm_backward(d_normed, d_x, *ctx.saved_tensors, None, 0.0, (0, 0))
        return dx, dweight, None
