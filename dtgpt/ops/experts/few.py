"""A mixture of experts without gradients, whole: as operations of their own, so that kernels may serve a decode step's
few tokens by the chosen experts' weights alone, where sorting rows by expert takes longer than their products.

Sharding rule: tokens may be sharded, and F, each rank then has an addend of the sums.
"""

from torch import Tensor

from dtgpt.ops.experts.inner import INNER
from dtgpt.ops.experts.products import grouped_linear
from dtgpt.ops.experts.routing import Choice, Routing, choose, router_logits, weigh
from dtgpt.ops.experts.rows import Order, gathered, sorted_rows, summed
from dtgpt.ops.operation import Operation


def _choice(x: Tensor, weight: Tensor, bias: Tensor | None, rule: Routing) -> Choice:
    logits = router_logits(x, weight, bias)
    experts = choose(logits, rule)
    return Choice(experts, weigh(logits, experts, rule))


def results_of(
    x: Tensor,
    order: Order,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Return what the experts make of tokens x `[N, H]`, rows `[M, H]` in their order."""
    inner = INNER(gathered(x, order), first, first_bias, order.ends, activation)
    return grouped_linear(inner, second, second_bias, order.ends)


def _sums(
    x: Tensor,
    choice: Choice,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    activation: str,
) -> Tensor:
    order = sorted_rows(choice.experts, len(first))
    made = results_of(x, order, first, first_bias, second, second_bias, activation)
    return summed(made, choice.weights, order)


# x, weight, bias, rule: the experts of x `[.., H]` by a router `[E, H]` with biases `[E]` or None, `[.., k]`.
CHOICE = Operation("choice", _choice, "experts and weights by x w^T + bias")
# x, choice, first, first_bias, second, second_bias, activation: the sums `[N, H]` over the experts of each token of
# x `[N, H]`, by stacks first `[E, 2 F, H]` and second `[E, H, F]`, biases `[E, ..]` or None, and a name of a gate's.
SUMS = Operation("expert_sums", _sums, "sum over j of w[t, j] expert_j(x[t])")
