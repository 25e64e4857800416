"""gelu_tanh(x + bias) (Hendrycks and Gimpel 2016, section 2: the approximation by tanh).

Sharding rule: any dimension may be sharded. A shard of the last dimension takes its shard of the bias; a shard of rows
gives a partial sum of the bias's gradient.
"""

import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.serve import Operation
from dtgpt.util.torch_private import is_dtensor


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) in plain torch: the test oracle."""
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


BIAS_GELU = Operation("bias_gelu", reference, "gelu_tanh(x + bias)")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) `[.., F]` in x's dtype, for x `[.., F]` and bias `[F]`.

    A bias that is a DTensor is replaced by its local shard, or gathered where x has all columns. Raises ValueError
    where bias and x do not fit.
    """
    return BIAS_GELU(x, local_bias(x, bias))


def local_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return the bias as a plain tensor that fits x, as `bias_gelu` says. Raises ValueError."""
    if is_dtensor(bias):
        bias = bias.full_tensor() if len(bias) == x.shape[-1] else bias.to_local()
    if bias.shape != x.shape[-1:]:  # the kernels do not check
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit x of shape {tuple(x.shape)}")
    return bias
