"""The gradient of a bias: the sum of a gradient over all dimensions but the last, accumulated in fp32.

Reference: `reference`. Fast path: Triton kernels in two stages (`layer_norm_kernels.column_sum`), the same result in
every run. Sharding rule: a cut of the rows leaves partial sums, a cut of the last dimension cuts the result.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dtgpt.ops.fast import has_triton


def reference(x: Tensor) -> Tensor:
    """The test oracle."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.flatten(0, -2).sum(0, dtype=wide).to(x.dtype)


def bias_gradient(x: Tensor) -> Tensor:
    """x `[.., F]` -> `[F]`, in x's dtype. Not differentiable on the fast path: it is itself a gradient."""
    return _column_sum(x) if has_triton(x) else reference(x)


@torch.library.custom_op("dtgpt::column_sum", mutates_args=(), device_types="cpu")
def _column_sum(x: Tensor) -> Tensor:
    return reference(x)


@_column_sum.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    from dtgpt.ops.layer_norm_kernels import column_sum

    return column_sum(x)


@_column_sum.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[-1])


@register_sharding(torch.ops.dtgpt.column_sum.default)
def _(x):
    rows = [([Partial()], [Shard(dim)]) for dim in range(x.ndim - 1)]
    whole = [([Replicate()], [Replicate()]), ([Partial()], [Partial()])]
    return [*whole, ([Shard(0)], [Shard(x.ndim - 1)]), *rows]
