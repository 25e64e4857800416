"""Quantisation and products of quantised tensors in plain PyTorch, on any device."""

import torch
from torch import Tensor


def record_amax(x: Tensor, amax: Tensor) -> None:
    """Raise the fp32 scalar `amax` to the largest |x|, in place."""
    torch.maximum(amax, x.detach().abs().amax().float(), out=amax)


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return saturate(round(x * scale)) in `dtype`, of x `[.., C]`: as it lies, `[R, C]`, and transposed, `[C, R]`;
    None for what is not asked for. `amax`, where given, is raised to the largest |x|."""
    if amax is not None:
        record_amax(x, amax)
    limit = torch.finfo(dtype).max
    q = (x.flatten(0, -2).float() * scale).clamp(-limit, limit).to(dtype)
    return q if rows else None, q.t().contiguous() if columns else None


def product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, fast: bool, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return a b^T `[M, N]` of a `[M, K]` and b `[N, K]`, each of 8 bits, times both inverse scales."""
    return ((a.to(dtype) * inverse_a.to(dtype)) @ (b.to(dtype) * inverse_b.to(dtype)).t()).to(dtype)


def rounded(x: Tensor, scale: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as 8 bits of `dtype` hold it, in the shape and dtype of x."""
    limit = torch.finfo(dtype).max
    return ((x.float() * scale).clamp(-limit, limit).to(dtype).float() * inverse).to(x.dtype)
