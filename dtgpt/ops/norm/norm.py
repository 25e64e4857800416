"""LayerNorm (Ba, Kiros and Hinton 2016), RMSNorm (Zhang and Sennrich 2019), and the residual addition before them:
bias, dropout, sum and norm in one pass. A norm without a bias is an RMSNorm.

Reference and test oracle: `norm_reference`, `residual_norm_reference`. Fast path: one Triton kernel over rows each way,
fp32 inside. Backward reads each activation once: it computes the normalised values again from the rounded sum and one
or two numbers per row, draws the dropout mask again, and sums the gradients of weight, bias and branch bias in two
stages without atomics, so that they are the same in every run.

Sharding rule: that of `dtgpt.ops.norm.residual`; gradients of weight and bias are partial sums, too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.kernels.devices import may_fuse
from dtgpt.ops.norm.residual import check_site, kernels, like, residual_reference, whole_bias
from dtgpt.ops.random.dropout import dropout
from dtgpt.ops.serve import is_apart


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return what `norm` does, in plain torch: the test oracle. RMSNorm is computed in fp32 at least and rounded once.
    So is LayerNorm on a CPU, where PyTorch sums the 16-bit gradients of weight and bias in 16 bits."""
    if bias is None:
        scale = reciprocal_root(x, eps)
        return (x.to(scale.dtype) * scale.unsqueeze(-1) * weight.to(scale.dtype)).to(x.dtype)
    inner = _wide(x) if x.device.type == "cpu" else x.dtype
    weight, bias = weight.to(x.dtype).to(inner), bias.to(x.dtype).to(inner)
    return F.layer_norm(x.to(inner), weight.shape, weight, bias, eps).to(x.dtype)


def residual_norm_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `residual_norm` does, in plain torch: the test oracle."""
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, norm_reference(total, weight, bias, eps)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise x `[.., H]` to `[.., H]` in x's dtype; weight and bias: `[H]` in x's dtype or fp32. LayerNorm, or
    RMSNorm x / sqrt(mean(x^2) + eps) * weight without a bias."""
    return norm_and_pass(x, weight, bias, eps)[1]


def norm_and_pass(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, `norm` of x), for a residual stream that also bypasses its norm.

    Backward adds the two gradients of x in the pass that makes that of the norm.
    """
    if not _runs_op(x, bias):
        return x, norm_reference(x, weight, bias, eps)
    return _NormAndPass.apply(x, weight, bias, eps)[:2]


def residual_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    key: Tensor | None, p: float, start: Sequence[int] = (0, 0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (sum, normed), `[B, T, H]` each: the sum that `residual` returns, and its `norm`.

    weight, bias: `[H]`; the other arguments, and errors raised, as of `residual`.
    """
    key, branch_bias = check_site(key, p, start), whole_bias(x, branch, branch_bias)
    if not _runs_op(x, bias):
        return residual_norm_reference(x, branch, branch_bias, weight, bias, eps, key, p, start)
    return _residual_norm(x, branch, branch_bias, weight, bias, eps, key, p, start)[:2]


def rms_norm_gradient(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx `[.., H]`, the gradient of the weight `[H]`) of an RMSNorm, in plain torch and the dtype of scale:
    `[..]`, the `reciprocal_root` of x `[.., H]`."""
    dx, dweight = _gradient(dy.to(scale.dtype), x, None, scale, weight)
    return dx, dweight.flatten(0, -2).sum(0)


def reciprocal_root(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) `[..]` of each row of x `[.., H]`, in fp32 at least."""
    return torch.rsqrt(x.to(_wide(x)).square().mean(-1) + eps)


def _runs_op(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether the op runs, and not the reference: where kernels can work, and where what backward keeps counts,
    which is x alone. The reference of LayerNorm keeps fp32 copies on a CPU in 16 bits; that of RMSNorm keeps several
    tensors on the meta device, on which planning measures activations."""
    if bias is None:
        return may_fuse(x) or (x.device.type == "meta" and not is_apart())
    return may_fuse(x) or (x.device.type == "cpu" and x.dtype.itemsize == 2 and not is_apart())


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _with_statistics(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed `[.., H]`, mean `[..]`, reciprocal standard deviation `[..]`); of an RMSNorm the mean is empty and
    the last is `reciprocal_root`."""
    normed = norm_reference(x, weight, bias, eps)
    if bias is None:
        return normed, x.new_empty(0, dtype=_wide(x)), reciprocal_root(x, eps)
    variance, mean = torch.var_mean(x.to(_wide(x)), dim=-1, correction=0)
    return normed, mean, torch.rsqrt(variance + eps)


def _like_statistics(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=_wide(x))
    return x.new_empty(x.shape), rstd.new_empty(0 if bias is None else rstd.shape), rstd


def _forward(x, branch, branch_bias, weight, bias, eps, key, p, start):
    """Launch the forward kernel. Return (sum or None without a branch, normed, mean, reciprocal standard deviation)."""
    total, normed, mean, rstd = kernels().norm_forward(x, branch, branch_bias, weight, bias, eps, key, p, start)
    return total, normed, rstd.new_empty(0) if mean is None else mean, rstd


_norm = torch.library.custom_op("dtgpt::norm", _with_statistics, mutates_args=(), device_types="cpu")


@_norm.register_kernel("cuda")
def _(x, weight, bias, eps):
    return _forward(x, None, None, weight, bias, eps, None, 0.0, (0, 0))[1:]


_norm.register_fake(lambda x, weight, bias, eps: _like_statistics(x, bias))


@torch.library.custom_op("dtgpt::residual_norm", mutates_args=(), device_types="cpu")
def _residual_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (sum, normed, mean, reciprocal standard deviation)."""
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, *_with_statistics(total, weight, bias, eps)


_residual_norm.register_kernel("cuda", lambda *inputs: _forward(*inputs))
_residual_norm.register_fake(lambda x, branch, branch_bias, weight, bias, *_: (like(x, x), *_like_statistics(x, bias)))


def _gradient(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, the terms of the weight's gradient), `[.., H]` each, in the dtype of dy and rstd."""
    rstd = rstd.unsqueeze(-1)
    xhat = (x.to(dy.dtype) if mean is None else x.to(dy.dtype) - mean.unsqueeze(-1)) * rstd
    weighted = dy * weight.to(dy.dtype)
    along = (weighted * xhat).mean(-1, keepdim=True)
    if mean is not None:
        weighted = weighted - weighted.mean(-1, keepdim=True)
    return rstd * (weighted - xhat * along), dy * xhat


@torch.library.custom_op("dtgpt::norm_backward", mutates_args=(), device_types="cpu")
def _norm_backward(
    d_normed: Tensor, d_sum: Tensor | None, total: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor,
    branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dx, d_branch, dweight, dbias, d_branch_bias).

    d_branch is empty without a key (it equals dx), dbias without a mean (that of an RMSNorm), d_branch_bias without a
    branch bias.
    """
    dy = d_normed.to(rstd.dtype)
    dx, dweight = _gradient(dy, total, mean, rstd, weight)
    dx = dx if d_sum is None else dx + d_sum
    d_branch = dx if key is None else dropout(dx, key, p, start)
    return (
        dx.to(total.dtype, copy=True),
        total.new_empty(0) if key is None else d_branch.to(total.dtype, copy=True),
        dweight.flatten(0, -2).sum(0).to(weight.dtype),
        total.new_empty(0) if mean is None else dy.flatten(0, -2).sum(0).to(weight.dtype),
        total.new_empty(0) if branch_bias is None else d_branch.flatten(0, -2).sum(0).to(branch_bias.dtype),
    )


@_norm_backward.register_kernel("cuda")
def _(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start):
    made = kernels().norm_backward(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start)
    return tuple(total.new_empty(0) if tensor is None else tensor for tensor in made)


@_norm_backward.register_fake
def _(d_normed, d_sum, total, mean, rstd, weight, branch_bias, key, p, start):
    d_branch, bias = None if key is None else total, None if mean is None else weight
    return tuple(like(tensor, total) for tensor in (total, d_branch, weight, bias, branch_bias))


def _save_residual_norm(ctx, inputs, output) -> None:
    _, _, branch_bias, weight, bias, _, key, ctx.p, ctx.start = inputs
    total, _, mean, rstd = output
    ctx.save_for_backward(total, None if bias is None else mean, rstd, weight, branch_bias, key)
    ctx.set_materialize_grads(False)  # the statistics have no gradient


def _differentiate_residual_norm(ctx, d_sum, d_normed, *_):
    saved = ctx.saved_tensors  # read once: recomputation frees saved tensors after the first access
    total, mean, _, _, branch_bias, key = saved
    d_normed = torch.zeros_like(total) if d_normed is None else d_normed
    dx, d_branch, dweight, dbias, d_branch_bias = _norm_backward(d_normed, d_sum, *saved, ctx.p, ctx.start)
    dbias, d_branch_bias = None if mean is None else dbias, None if branch_bias is None else d_branch_bias
    return dx, dx if key is None else d_branch, d_branch_bias, dweight, dbias, None, None, None, None


class _NormAndPass(torch.autograd.Function):
    """Differentiate `norm_and_pass`: an autograd function, since a custom op may not return its input."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.view_as(x), *_norm(x, weight, bias, eps)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, bias, _ = inputs
        _, _, mean, rstd = output
        ctx.save_for_backward(x, None if bias is None else mean, rstd, weight)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_x, d_normed, *_):
        if d_normed is None:
            return d_x, None, None, None
        x, mean, rstd, weight = ctx.saved_tensors
        dx, _, dweight, dbias, _ = _norm_backward(d_normed, d_x, x, mean, rstd, weight, None, None, 0.0, (0, 0))
        return dx, dweight, None if mean is None else dbias, None


_residual_norm.register_autograd(_differentiate_residual_norm, setup_context=_save_residual_norm)
