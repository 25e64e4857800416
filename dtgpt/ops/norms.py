"""The residual stream of a transformer block: the sum x + dropout(branch + bias), and the norm of it.

LayerNorm (Ba, Kiros and Hinton 2016), or without a bias RMSNorm (Zhang and Sennrich 2019). The sum and the norm behind
it are one operation, since a kernel that has summed a row has what its norm needs: between two matrices an activation
is read and written once.

Sharding rule: rows (samples and positions) may be sharded, the hidden dimension may not. A shard of the positions
passes the global index of its first element as `start`; its gradients of the branch's bias, and of the norm's weight
and bias, are partial sums."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.operation import Operation
from dtgpt.ops.random.dropout import LANES, dropout
from dtgpt.util.torch_private import is_dtensor


def residual_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int]
) -> Tensor:
    """Return x + dropout(branch + bias) in plain torch: the test oracle."""
    branch = branch if branch_bias is None else branch + branch_bias.to(branch.dtype)
    return x + (branch if key is None else dropout(branch, key, p, start))


RESIDUAL = Operation("residual", residual_reference, "x + dropout(branch + bias)")


def residual(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int] = (0, 0)
) -> Tensor:
    """Return x + dropout(branch + branch_bias) `[B, T, H]`, rounded to x's dtype.

    x, branch: `[B, T, H]` of one dtype; key: int64 `[B, 2]`, or None for no dropout; start: global position and column
    of the first element within a sample. Raises ValueError where shapes do not fit or 8 does not divide the column.
    """
    return _row_sums.residual(x, branch, whole_bias(x, branch, branch_bias), check_site(key, p, start), p, start)


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


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of each row in plain torch: the test oracle. RMSNorm is computed in fp32 at least and rounded
    once. So is LayerNorm on a CPU, where PyTorch sums the 16-bit gradients of weight and bias in 16 bits."""
    if bias is None:
        scale = reciprocal_root(x, eps)
        return (x.to(scale.dtype) * scale.unsqueeze(-1) * weight.to(scale.dtype)).to(x.dtype)
    inner = wide(x) if x.device.type == "cpu" else x.dtype
    weight, bias = weight.to(x.dtype).to(inner), bias.to(x.dtype).to(inner)
    return F.layer_norm(x.to(inner), weight.shape, weight, bias, eps).to(x.dtype)


def residual_norm_reference(
    x: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    key: Tensor | None,
    p: float,
    start: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the residual sum, and its norm, in plain torch: the test oracle."""
    total = residual_reference(x, branch, branch_bias, key, p, start)
    return total, norm_reference(total, weight, bias, eps)


def _norm_and_pass(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, `norm` of x), for a residual stream that also bypasses its norm: a kernel's backward adds the two
    gradients of x in the pass that makes that of the norm."""
    return x, norm_reference(x, weight, bias, eps)


NORM_AND_PASS = Operation(
    "norm_and_pass",
    _norm_and_pass,
    "x, and (x - mean) / sqrt(variance + eps) weight + bias or x / sqrt(mean(x^2) + eps) weight",
)
RESIDUAL_NORM = Operation("residual_norm", residual_norm_reference, "s = x + dropout(branch + bias), and the norm of s")


class RowSums:
    """What computes the operations here, and activations between matrices. One whose gradients of parameters have an
    order of its own in their sums over rows derives from it. The arguments are those of the operations."""

    residual: Callable[..., Any] = RESIDUAL
    norm_and_pass: Callable[..., Any] = NORM_AND_PASS
    residual_norm: Callable[..., Any] = RESIDUAL_NORM
    rotary_qkv: Callable[..., Any] | None = None  # of heads that are normalised; None: the operation of that name

    def activated(self, activation: Callable[..., Tensor], width: int, x: Tensor, *bias: Tensor) -> Tensor:
        """Return activation(x, *bias), `[.., width / tp]`, of columns that tensor parallelism may cut."""
        return activation(x, *bias)


_row_sums = RowSums()


@contextmanager
def rows_summed_by(sums: RowSums) -> Iterator[None]:
    """Let `sums` compute the gradients of parameters that all rows share while the context lasts."""
    global _row_sums
    before, _row_sums = _row_sums, sums
    try:
        yield
    finally:
        _row_sums = before


def row_sums() -> RowSums:
    """Return what `rows_summed_by` has named, or what computes the operations alone."""
    return _row_sums


def norm_and_pass(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, its `norm`), `[.., H]` each."""
    return _row_sums.norm_and_pass(x, weight, bias, eps)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise x `[.., H]` to `[.., H]` in x's dtype; weight and bias: `[H]` in x's dtype or fp32. LayerNorm, or
    RMSNorm x / sqrt(mean(x^2) + eps) * weight without a bias."""
    return norm_and_pass(x, weight, bias, eps)[1]


def residual_norm(
    x: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    key: Tensor | None,
    p: float,
    start: Sequence[int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """Return (sum, normed), `[B, T, H]` each: the sum that `residual` returns, and its `norm`.

    weight, bias: `[H]`, of the norm. x, branch, branch_bias, key, p and start are arguments of `residual`, which raises
    the same errors.
    """
    key, branch_bias = check_site(key, p, start), whole_bias(x, branch, branch_bias)
    return _row_sums.residual_norm(x, branch, branch_bias, weight, bias, eps, key, p, start)


def reciprocal_root(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) `[..]` of each row of x `[.., H]`, in fp32 at least."""
    return torch.rsqrt(x.to(wide(x)).square().mean(-1) + eps)


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of x, or fp32 where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)
