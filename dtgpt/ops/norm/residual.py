"""The residual sum x + dropout(branch + bias) of a transformer block, in one pass.

Reference: `residual_reference`. Fast path: the Triton kernels of the norms, without the norm. Backward
draws the dropout mask again and sums the gradient of the bias in two stages without atomics.

Sharding rule: rows (samples and positions) may be sharded, the hidden dimension may not. A shard of the positions
passes the global index of its first element as `start`; its gradient of the branch bias is a partial sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.fast import may_fuse
from dtgpt.ops.pointwise.bias import bias_gradient
from dtgpt.ops.random.dropout import LANES, dropout
from dtgpt.util.torch_private import is_dtensor


def kernels():
    from dtgpt.ops.norm import norm_kernels  # imported on first use, since it needs Triton

    return norm_kernels


def residual_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int]
) -> Tensor:
    """Return what `residual` does, in plain torch: the test oracle."""
    branch = branch if branch_bias is None else branch + branch_bias.to(branch.dtype)
    return x + (branch if key is None else dropout(branch, key, p, start))


def residual(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int] = (0, 0)
) -> Tensor:
    """Return x + dropout(branch + branch_bias) `[B, T, H]`, rounded to x's dtype.

    x, branch: `[B, T, H]` of one dtype; key: int64 `[B, 2]`, or None for no dropout; start: global position and column
    of the first element within a sample. Raises ValueError where shapes do not fit or 8 does not divide the column.
    """
    key, branch_bias = check_site(key, p, start), whole_bias(x, branch, branch_bias)
    if not may_fuse(x) or (branch_bias is None and key is None):
        return residual_reference(x, branch, branch_bias, key, p, start)
    return _residual(x, branch, branch_bias, key, p, start)


def whole_bias(x: Tensor, branch: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the bias, gathered where it is a DTensor. Raises ValueError where shapes do not fit."""
    if is_dtensor(bias):
        bias = bias.full_tensor()
    if branch.shape != x.shape or (bias is not None and bias.shape != x.shape[-1:]):
        raise ValueError(f"a branch of shape {tuple(branch.shape)} does not fit x of shape {tuple(x.shape)}")
    return bias


def check_site(key: Tensor | None, p: float, start: Sequence[int]) -> Tensor | None:
    """Return the key, or None where p is 0. Raises ValueError for a first column within a block of eight."""
    if start[1] % LANES:
        raise ValueError(f"start={tuple(start)}: a shard's first column must be a multiple of {LANES}")
    return None if p == 0 else key


def like(tensor: Tensor | None, x: Tensor) -> Tensor:
    """Return memory for the gradient of an optional tensor, empty and of x's dtype where the tensor is None."""
    return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


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
