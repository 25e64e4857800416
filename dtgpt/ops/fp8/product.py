"""Products of 8-bit floats with fp32 sums.

Fast path: cuBLASLt through `torch.nn.functional.scaled_mm`, where the GPU has such products (compute capability 8.9
on) and all sizes are multiples of 16. Otherwise the factors are cast to a wider type, which holds all their values.
Sharding rule: rows of either factor may be sharded; a shard of the common dimension gives a partial sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.util.shared.gpu_limits import has_float8

STEP = 16  # of every size and address, in cuBLASLt's products of 8-bit floats
ROWS = 4  # kernels make 32-bit words of the 8-bit values of so many


def reference(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return what `product` does, in plain torch: the test oracle. Casts are exact, and so is a scale that is a power
    of two."""
    wide = torch.bfloat16 if a.is_cuda else torch.float32  # bf16 has tensor cores on a GPU, and sums in fp32 there
    y = (a.to(wide) @ b.to(wide).t()) * (inverse_a * inverse_b)
    return (y if bias is None else y + bias).to(dtype)


def product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Return a b^T * inverse_a * inverse_b + bias `[M, N]` in `dtype`, for a `[M, K]` and b `[N, K]` of 8-bit floats.

    inverse_a, inverse_b: fp32 scalar tensors, the inverses of the factors' scales. bias: `[N]` in `dtype`, or None.
    fast: sum in the tensor cores' own precision, about 14 bits; otherwise fp32 takes up the sums of groups, which takes
    5 % longer, and is what training does. Not differentiable. On the meta device nothing is computed.
    """
    if a.is_meta:
        return a.new_empty(len(a), len(b), dtype=dtype)
    if not _has_kernel(a, b):
        return reference(a, b, inverse_a, inverse_b, dtype, bias)
    whole, bias = F.ScalingType.TensorWise, None if bias is None else _aligned(bias)
    factors = a, b.t(), _aligned(inverse_a), whole, _aligned(inverse_b), whole
    return F.scaled_mm(*factors, bias=bias, output_dtype=dtype, use_fast_accum=fast)


def _aligned(vector: Tensor) -> Tensor:
    """Return a vector or scalar at an address that is a multiple of STEP: others end in an error of cuBLASLt."""
    return vector.clone() if vector.data_ptr() % STEP else vector


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    both_wide = a.dtype == b.dtype == torch.float8_e5m2  # the one pair of formats that cuBLASLt does not multiply
    sizes = (*a.shape, *b.shape)
    return a.is_cuda and has_float8(a.device) and not both_wide and all(size and size % STEP == 0 for size in sizes)
