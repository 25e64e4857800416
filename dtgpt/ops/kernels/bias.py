"""The gradient of a bias: the sum of a gradient over all dimensions but the last, accumulated in fp32.

Reference: `reference`. Fast path: Triton kernels in two stages (`dtgpt.ops.kernels.column_kernels`), the same result in
every run. Sharding rule: a shard of the rows gives partial sums, a shard of the last dimension its shard of the result.
"""

from functools import cache

import torch
from torch import Tensor

from dtgpt.ops.kernels.devices import has_triton
from dtgpt.util.torch_private import constant_result


def kernels():
    from dtgpt.ops.kernels import column_kernels  # imported on first use, since it needs Triton

    return column_kernels


def reference(x: Tensor) -> Tensor:
    """Return what `bias_gradient` does, in plain torch: the test oracle."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.flatten(0, -2).sum(0, dtype=wide).to(x.dtype)


def bias_gradient(x: Tensor) -> Tensor:
    """Sum x `[.., F]` to `[F]`, in x's dtype. The fast path is not differentiable, since the sum is a gradient."""
    return _column_sum(x) if has_triton(x) else reference(x)


_column_sum = torch.library.custom_op("dtgpt::column_sum", reference, mutates_args=(), device_types="cpu")
_column_sum.register_kernel("cuda", lambda x: kernels().column_sum(x))
_column_sum.register_fake(lambda x: x.new_empty(x.shape[-1]))


@constant_result  # Dynamo cannot trace it
def register_rule() -> None:
    """Tell DTensor the sharding rule, before the first gradient of a cut bias: other runs need no DTensor."""
    _register_rule()


@cache
def _register_rule() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.dtgpt.column_sum.default)
    def _(x):
        rows = [([Partial()], [Shard(dim)]) for dim in range(x.ndim - 1)]
        whole = [([Replicate()], [Replicate()]), ([Partial()], [Partial()])]
        return [*whole, ([Shard(0)], [Shard(x.ndim - 1)]), *rows]
