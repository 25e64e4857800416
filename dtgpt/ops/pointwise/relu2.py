"""relu(x + bias)^2 (So et al. 2021, Primer). Sharding rule: that of `dtgpt.ops.pointwise.gelu`."""

from torch import Tensor

from dtgpt.ops.pointwise.gelu import local_bias
from dtgpt.ops.serve import Operation


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 in plain torch: the test oracle."""
    return (x + bias.to(x.dtype)).relu().square()


BIAS_RELU2 = Operation("bias_relu2", reference, "relu(x + bias)^2")


def bias_relu2(x: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x + bias)^2 `[.., F]` in x's dtype; arguments and errors as of `bias_gelu`."""
    return BIAS_RELU2(x, local_bias(x, bias))
