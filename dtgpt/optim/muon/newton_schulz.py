"""Orthogonalise matrices by the Newton-Schulz iterations of Muon (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon).

Of a matrix with the singular value decomposition U S V^T the result is close to U V^T: five iterations of the quintic
bring every singular value above 1e-3 of the norm to between 0.7 and 1.2. Plain matrix products, batched: cuBLAS is the
fast path, and a CUDA graph may capture it. Sharding rule: none, a matrix is whole.
"""

import torch
from torch import Tensor

COEFFICIENTS = {  # of x, x^3 and x^5
    "quintic": (3.4445, -4.7750, 2.0315),  # a slope as steep as possible at 0
    "convergent": (2.0, -1.5, 0.5),  # a slope of 0 at the fixed point 1
}
SMALLEST_NORM = 1e-7


def orthogonalize(
    matrices: Tensor, steps: int, coefficients: tuple[float, float, float] = COEFFICIENTS["quintic"]
) -> Tensor:
    """Return `matrices [N, R, C]`, each orthogonalised by `steps` iterations, in their dtype."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    x = (x / norms.clamp(min=SMALLEST_NORM)).to(matrices.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations of a matrix `[rows, columns]`."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
