"""The residual sum x + dropout(branch + bias) of a transformer block, in one pass.

Reference: `residual_reference`. Fast path: the Triton kernels of `dtgpt.ops.layer_norm`, less the norm. Backward draws
the dropout mask again and sums the gradient of the bias in two stages without atomics.

Sharding rule: rows (samples and positions) may be cut, the hidden dimension may not. Under a cut of the positions
`start` is that of the shard; the gradient of the branch bias is then a partial sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dtgpt.ops.bias import bias_gradient
from dtgpt.ops.dropout import LANES, dropout
from dtgpt.ops.fast import may_fuse


def residual_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int]
) -> Tensor:
    branch = branch if branch_bias is None else branch + branch_bias.to(branch.dtype)
    return x + (branch if key is None else dropout(branch, key, p, start))


def residual(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int] = (0, 0)
) -> Tensor:
    """x + dropout(branch + branch_bias) `[B, T, H]`, rounded to x's dtype.

    x, branch: `[B, T, H]` of one dtype; key: int64 `[B, 2]`, or None for no dropout; start: the global position and
    column of the first element within a sample. ValueError where the column is no multiple of eight.
    """
    key, branch_bias = check_site(key, p, start), whole_bias(x, branch, branch_bias)
    if not may_fuse(x) or (branch_bias is None and key is None):
        return residual_reference(x, branch, branch_bias, key, p, start)
    return _residual(x, branch, branch_bias, key, p, start)


def whole_bias(x: Tensor, branch: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias, whole where tensor parallelism cut it. ValueError where shapes do not fit, which kernels believe."""
    if isinstance(bias, DTensor) and not isinstance(branch, DTensor):
        bias = bias.full_tensor()
    if branch.shape != x.shape or (bias is not None and bias.shape != x.shape[-1:]):
        raise ValueError(f"a branch of {tuple(branch.shape)} does not fit x of {tuple(x.shape)}")
    return bias


def check_site(key: Tensor | None, p: float, start: Sequence[int]) -> Tensor | None:
    """The key, or None where nothing can be dropped."""
    if start[1] % LANES:
        raise ValueError(f"start={tuple(start)}: a shard's first column must be a multiple of {LANES}")
    return None if p == 0 else key


def kernels():
    from dtgpt.ops import layer_norm_kernels  # here, since it needs Triton

    return layer_norm_kernels


def like(tensor: Tensor | None, x: Tensor) -> Tensor:
    """What an op returns for the gradient of an optional tensor: nothing, in x's dtype, where there is none."""
    return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


@torch.library.custom_op("dtgpt::residual", mutates_args=(), device_types="cpu")
def _residual(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int]
) -> Tensor:
    return residual_reference(x, branch, branch_bias, key, p, start)


_residual.register_kernel(
    "cuda", lambda x, branch, bias, *dropped: kernels().norm_forward(x, branch, bias, None, None, 0.0, *dropped)[0]
)
_residual.register_fake(lambda x, *_: like(x, x))


@torch.library.custom_op("dtgpt::dropout_backward", mutates_args=(), device_types="cpu")
def _dropout_backward(
    d_sum: Tensor, branch_bias: Tensor | None, key: Tensor, p: float, start: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(d_branch, d_branch_bias), the second empty without a branch bias."""
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


WHOLE = Replicate()


def cuts(dims: int) -> list[tuple]:
    """(placement of rows, of keys, of a gradient that sums over rows)."""
    rows = [(Shard(dim), WHOLE if dim else Shard(0), Partial()) for dim in range(dims - 1)]
    return [(WHOLE, WHOLE, WHOLE), *rows]


def given(tensor, placement, otherwise=None):
    return otherwise if tensor is None else placement


@register_sharding(torch.ops.dtgpt.residual.default)
def _(x, branch, branch_bias, key, p, start):
    return [
        ([rows], [rows, rows, given(branch_bias, WHOLE), given(key, keys), None, None])
        for rows, keys, _ in cuts(x.ndim)
    ]


@register_sharding(torch.ops.dtgpt.dropout_backward.default)
def _(d_sum, branch_bias, key, p, start):
    return [
        ([rows, given(branch_bias, sums, WHOLE)], [rows, given(branch_bias, WHOLE), keys, None, None])
        for rows, keys, sums in cuts(d_sum.ndim)
    ]
