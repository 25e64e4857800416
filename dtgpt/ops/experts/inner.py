"""What experts have between their two matrices: rows of tokens by the first ones, and the function of the gate.

As one operation, so that a kernel may gather rows as it multiplies, and apply the function before it writes. Sharding
rule: tokens may be sharded, and F.
"""

from torch import Tensor

from dtgpt.ops.experts.products import grouped_linear
from dtgpt.ops.experts.rows import Order, gathered
from dtgpt.ops.more_activations import GATED
from dtgpt.ops.operation import Operation


def _inner(x: Tensor, weight: Tensor, bias: Tensor | None, order: Order, activation: str) -> Tensor:
    return GATED[activation](grouped_linear(gathered(x, order), weight, bias, order.ends))  # type: ignore[index]


# x, weight, bias, order, activation: f(gate) up `[M, F]` of the rows that an order has of tokens x `[N, H]`, by a stack
# `[E, 2 F, H]`, biases `[E, 2 F]` or None, and a name of a gate's.
INNER = Operation("expert_inner", _inner, "f(gate) up of grouped_product")
