"""The residual sum x + dropout(branch + bias) of a transformer block.

Sharding rule: rows (samples and positions) may be sharded, the hidden dimension may not. A shard of the positions
passes the global index of its first element as `start`; its gradient of the branch bias is a partial sum.
"""

from collections.abc import Sequence

from torch import Tensor

from dtgpt.ops.random.dropout import LANES, dropout
from dtgpt.ops.serve import Operation
from dtgpt.util.torch_private import is_dtensor


def residual_reference(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, key: Tensor | None, p: float, start: Sequence[int]
) -> Tensor:
    """Return what `residual` does, in plain torch: the test oracle."""
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
    return RESIDUAL(x, branch, whole_bias(x, branch, branch_bias), check_site(key, p, start), p, start)


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
