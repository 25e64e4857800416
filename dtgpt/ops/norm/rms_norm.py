"""RMSNorm (Zhang and Sennrich 2019) and the residual addition before it.

Reference and test oracle: `rms_norm_reference`, `residual_rms_norm_reference`. Sharding rule: that of
`dtgpt.ops.norm.residual`; the gradient of the weight is a partial sum, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.norm.residual import check_site, residual_reference


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, computed in fp32 at least and rounded once to x's dtype: the test
    oracle."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


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
    """Return (x, `rms_norm` of x), for a residual stream that also bypasses its norm."""
    return x, rms_norm_reference(x, weight, eps)


def residual_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, key: Tensor | None, p: float, start: Sequence[int] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """Return (sum, normed), `[B, T, H]` each: x + dropout(branch), and its RMSNorm.

    weight: `[H]`; the other arguments, and errors raised, as of `residual`.
    """
    return residual_rms_norm_reference(x, branch, weight, eps, check_site(key, p, start), p, start)
