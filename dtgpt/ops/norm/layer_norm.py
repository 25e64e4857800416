"""LayerNorm (Ba, Kiros and Hinton 2016) and the residual addition before it: bias, dropout, sum and norm in one pass.

Reference and test oracle: `layer_norm_reference`, `residual_norm_reference`. Fast path: one Triton kernel over rows
each way, fp32 inside. Backward reads each activation once: it computes the normalised values again from the rounded sum
and two numbers per row, draws the dropout mask again, and sums the gradients of weight, bias and branch bias in two
stages without atomics, so that they are the same in every run.

Sharding rule: that of `dtgpt.ops.norm.residual`; gradients of weight and bias are partial sums, too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.fast import is_apart, may_fuse
from dtgpt.ops.norm.residual import check_site, kernels, like, residual_reference, whole_bias
from dtgpt.ops.random.dropout import dropout


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return what `layer_norm` does, in plain torch: the test oracle. On a CPU, where PyTorch sums the 16-bit gradients
    of weight and bias in 16 bits, in fp32."""
    inner = _wide(x) if x.device.type == "cpu" else x.dtype
    weight, bias = weight.to(x.dtype).to(inner), bias.to(x.dtype).to(inner)
    return F.layer_norm(x.to(inner), weight.shape, weight, bias, eps).to(x.dtype)


def residual_norm_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `residual_norm` does, in plain torch: the test oracle."""
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, layer_norm_reference(total, weight, bias, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise x `[.., H]` to `[.., H]` in x's dtype; weight and bias: `[H]` in x's dtype or fp32."""
    return norm_and_pass(x, weight, bias, eps)[1]


def norm_and_pass(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, `layer_norm` of x), for a residual stream that also bypasses its norm.

    Backward adds the two gradients of x in the pass that makes that of the norm.
    """
    if not _runs_op(x):
        return x, layer_norm_reference(x, weight, bias, eps)
    return _NormAndPass.apply(x, weight, bias, eps)[:2]


def residual_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    key: Tensor | None, p: float, start: Sequence[int] = (0, 0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (sum, normed), `[B, T, H]` each: the sum that `residual` returns, and its LayerNorm.

    weight, bias: `[H]`; the other arguments, and errors raised, as of `residual`.
    """
    key, branch_bias = check_site(key, p, start), whole_bias(x, branch, branch_bias)
    if not _runs_op(x):
        return residual_norm_reference(x, branch, branch_bias, weight, bias, eps, key, p, start)
    return _residual_norm(x, branch, branch_bias, weight, bias, eps, key, p, start)[:2]


def _runs_op(x: Tensor) -> bool:
    """Return whether the op runs, and not the reference: where kernels can work, and on a CPU in 16 bits. There its
    backward keeps x alone, where the reference keeps fp32 copies."""
    return may_fuse(x) or (x.device.type == "cpu" and x.dtype.itemsize == 2 and not is_apart())


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _statistics(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed `[.., H]`, mean `[..]`, reciprocal standard deviation `[..]`)."""
    variance, mean = torch.var_mean(x.to(_wide(x)), dim=-1, correction=0)
    return layer_norm_reference(x, weight, bias, eps), mean, torch.rsqrt(variance + eps)


def _like_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=_wide(x)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


_layer_norm = torch.library.custom_op("dtgpt::layer_norm", _statistics, mutates_args=(), device_types="cpu")


@_layer_norm.register_kernel("cuda")
def _(x, weight, bias, eps):
    return kernels().norm_forward(x, None, None, weight, bias, eps, None, 0.0, (0, 0))[1:]


_layer_norm.register_fake(lambda x, *_: _like_statistics(x))


@torch.library.custom_op("dtgpt::residual_norm", mutates_args=(), device_types="cpu")
def _residual_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (sum, normed, mean, reciprocal standard deviation)."""
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, *_statistics(total, weight, bias, eps)


_residual_norm.register_kernel("cuda", lambda *inputs: kernels().norm_forward(*inputs))
_residual_norm.register_fake(lambda x, *_: (like(x, x), *_like_statistics(x)))


@torch.library.custom_op("dtgpt::norm_backward", mutates_args=(), device_types="cpu")
def _norm_backward(
    d_normed: Tensor, d_sum: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dx, d_branch, dweight, dbias, d_branch_bias).

    d_branch is empty without a key (it equals dx), d_branch_bias without a branch bias.
    """
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


def _save_residual_norm(ctx, inputs, output) -> None:
    _, _, branch_bias, weight, _, _, key, ctx.p, ctx.start = inputs
    total, _, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, weight, branch_bias, key)
    ctx.set_materialize_grads(False)  # the statistics have no gradient


def _differentiate_residual_norm(ctx, d_sum, d_normed, *_):
    saved = ctx.saved_tensors  # read once: recomputation frees saved tensors after the first access
    total, _, _, _, branch_bias, key = saved
    d_normed = torch.zeros_like(total) if d_normed is None else d_normed
    dx, d_branch, dweight, dbias, d_branch_bias = _norm_backward(d_normed, d_sum, *saved, ctx.p, ctx.start)
    d_branch_bias = None if branch_bias is None else d_branch_bias
    return dx, dx if key is None else d_branch, d_branch_bias, dweight, dbias, None, None, None, None


class _NormAndPass(torch.autograd.Function):
    """Differentiate `norm_and_pass`: an autograd function, since a custom op may not return its input."""

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


_residual_norm.register_autograd(_differentiate_residual_norm, setup_context=_save_residual_norm)
