"""What serves the norms and the residual sum: one Triton kernel over rows each way, fp32 inside.

Backward reads each activation once: it computes the normalised values again from the rounded sum and one or two numbers
per row, draws the dropout mask again, and sums the gradients of weight, bias and branch bias in two stages without
atomics, so that they are the same in every run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.kernels.bias import bias_gradient
from dtgpt.ops.kernels.devices import by_triton, may_fuse
from dtgpt.ops.norms import norm_reference, reciprocal_root, residual_reference, wide
from dtgpt.ops.operation import Kernel, is_apart
from dtgpt.ops.random.dropout import dropout


def kernels():
    from dtgpt.ops.kernels import norm_kernels  # imported on first use, since it needs Triton

    return norm_kernels


def like(tensor: Tensor | None, x: Tensor) -> Tensor:
    """Return memory for the gradient of an optional tensor, empty and of x's dtype where the tensor is None."""
    return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


def _with_statistics(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed `[.., H]`, mean `[..]`, reciprocal standard deviation `[..]`); of an RMSNorm the mean is empty and
    the last is `reciprocal_root`."""
    normed = norm_reference(x, weight, bias, eps)
    if bias is None:
        return normed, x.new_empty(0, dtype=wide(x)), reciprocal_root(x, eps)
    variance, mean = torch.var_mean(x.to(wide(x)), dim=-1, correction=0)
    return normed, mean, torch.rsqrt(variance + eps)


def _like_statistics(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x))
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
    x: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    key: Tensor | None,
    p: float,
    start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def rms_norm_gradient(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx `[.., H]`, the gradient of the weight `[H]`) of an RMSNorm, in plain torch and the dtype of scale:
    `[..]`, the `reciprocal_root` of x `[.., H]`."""
    dx, dweight = _gradient(dy.to(scale.dtype), x, None, scale, weight)
    return dx, dweight.flatten(0, -2).sum(0)


@torch.library.custom_op("dtgpt::norm_backward", mutates_args=(), device_types="cpu")
def _norm_backward(
    d_normed: Tensor,
    d_sum: Tensor | None,
    total: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    branch_bias: Tensor | None,
    key: Tensor | None,
    p: float,
    start: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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


_residual = torch.library.custom_op("dtgpt::residual", residual_reference, mutates_args=(), device_types="cpu")
_residual.register_kernel(
    "cuda", lambda x, branch, bias, *dropped: kernels().norm_forward(x, branch, bias, None, None, 0.0, *dropped)[0]
)
_residual.register_fake(lambda x, *_: like(x, x))


@torch.library.custom_op("dtgpt::dropout_backward", mutates_args=(), device_types="cpu")
def _dropout_backward(
    d_sum: Tensor, branch_bias: Tensor | None, key: Tensor, p: float, start: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return (d_branch, d_branch_bias); the latter is empty without a branch bias."""
    d_branch = dropout(d_sum, key, p, start)
    return d_branch, d_sum.new_empty(0) if branch_bias is None else bias_gradient(d_branch).to(branch_bias.dtype)


@_dropout_backward.register_kernel("cuda")
def _(d_sum, branch_bias, key, p, start):
    made = kernels().norm_backward(None, d_sum, None, None, None, None, branch_bias, key, p, start)
    return made[1], d_sum.new_empty(0) if branch_bias is None else made[4]


_dropout_backward.register_fake(lambda d_sum, bias, *_: (like(d_sum, d_sum), like(bias, d_sum)))


def _save_residual(ctx, inputs, output) -> None:
    _, _, branch_bias, key, ctx.p, ctx.start = inputs
    ctx.save_for_backward(branch_bias, key)


def _differentiate_residual(ctx, d_sum):
    branch_bias, key = ctx.saved_tensors
    if key is None:
        d_branch, d_branch_bias = d_sum, torch.ops.dtgpt.column_sum(d_sum)
    else:
        d_branch, d_branch_bias = _dropout_backward(d_sum, branch_bias, key, ctx.p, ctx.start)
    return d_sum, d_branch, None if branch_bias is None else d_branch_bias, None, None, None


_residual.register_autograd(_differentiate_residual, setup_context=_save_residual)


def _passed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _NormAndPass.apply(x, weight, bias, eps)[:2]


def _residual_normed(*inputs) -> tuple[Tensor, Tensor]:
    return _residual_norm(*inputs)[:2]


def _runs(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> bool:
    """Return whether kernels can work on x; on the meta device, where planning measures activations, the definition of
    an RMSNorm keeps several tensors, and these ops x alone."""
    return may_fuse(x) or (bias is None and x.is_meta and not is_apart())


def _runs_on_a_cpu(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether backward of the definition would keep fp32 copies: that of a LayerNorm does in 16 bits."""
    return bias is not None and x.is_cpu and x.dtype.itemsize == 2 and not is_apart()


def _on_a_cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "it runs on CPUs"


def _serves_residual(x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, *_: Any) -> bool:
    return (branch_bias is not None or key is not None) and may_fuse(x)


SIXTEEN_BITS = "on CPUs, LayerNorm in 16 bits: backward computes in fp32, and keeps 16 bits"
NORM_AND_PASS = (
    by_triton(_passed, _runs),
    Kernel("PyTorch", lambda x, weight, bias, eps: _runs_on_a_cpu(x, bias), _passed, _on_a_cpu, SIXTEEN_BITS),
)
RESIDUAL_NORM = (
    by_triton(_residual_normed, lambda x, branch, shift, weight, bias, *_: _runs(x, weight, bias)),
    Kernel("PyTorch", lambda x, *others: _runs_on_a_cpu(x, others[3]), _residual_normed, _on_a_cpu, SIXTEEN_BITS),
)
RESIDUAL = (by_triton(_residual, _serves_residual, "on GPUs, with a bias or dropout"),)
