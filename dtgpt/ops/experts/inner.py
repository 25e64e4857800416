"""What experts have between their two matrices: rows of tokens by the first ones, and the function of the gate.

As one operation, so that a kernel may apply the function before it writes. Sharding rule: rows may be sharded, and F.
"""

from torch import Tensor

from dtgpt.ops.experts.products import grouped_linear
from dtgpt.ops.more_activations import GATED
from dtgpt.ops.operation import Operation


def _inner(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, activation: str) -> Tensor:
    return GATED[activation](grouped_linear(rows, weight, bias, ends))  # type: ignore[index]


# rows, weight, bias, ends, activation: f(gate) up `[M, F]` of rows `[M, H]`, each expert's up to one of `ends [E]`, by
# a stack `[E, 2 F, H]`, biases `[E, 2 F]` or None, and a name of a gate's.
INNER = Operation("expert_inner", _inner, "f(gate) up of grouped_product")
