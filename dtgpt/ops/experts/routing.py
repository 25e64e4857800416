"""From the logits of a router to the experts of each token, and their weights, by the rules of several families.

The same token chooses the same experts under every plan: logits are computed in fp32 from inputs and weights as they
are, and where two experts have equal scores the one with the smaller index comes first (`torch.topk` says nothing of
their order). A token always has its experts: none is dropped for lack of room. Sharding rule: rows may be sharded.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.linear import linear
from dtgpt.ops.operation import Operation, is_apart

Score = Literal["softmax", "softmax_of_chosen", "sigmoid"]
SMALLEST = 1e-20  # added to the sum of sigmoids that divides them (DeepSeek-AI 2024, DeepSeek-V3)


class Routing(NamedTuple):
    """How a router chooses. score: what weights follow from: the softmax over all experts or over the chosen ones, or
    the sigmoid of each. normalised: whether the weights of a token add up to `factor`. groups: of as many experts each,
    of which the `open_groups` with the largest sum of their two best scores can be chosen from."""

    chosen: int  # experts of each token
    score: Score = "softmax"
    normalised: bool = False
    factor: float = 1.0
    groups: int = 1
    open_groups: int = 1


class Choice(NamedTuple):
    """The experts of each token, the best first: their slots."""

    experts: Tensor  # int64 [.., k]
    weights: Tensor  # fp32 [.., k]

    def flat(self) -> "Choice":
        """Return the choices `[N, k]` of all tokens."""
        return Choice(*(each.flatten(0, -2) for each in self))


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.to(wide), None)


# x [.., H], weight [E, H]: x w^T in fp32 at least, whose bits do not depend on the number of rows.
wide_product = Operation("wide_product", _wide_product, "x w^T in fp32")


def _wide_product_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    dx = (grad @ weight.to(grad.dtype)).to(x.dtype) if wants_x else None
    rows = x.flatten(0, -2).to(grad.dtype)
    return dx, (grad.flatten(0, -2).t() @ rows).to(weight.dtype) if wants_weight else None


# grad [.., E] of that product, x, weight, and whether to return that of x, and of weight; None in its place.
wide_product_gradients = Operation("wide_product_gradients", _wide_product_gradients, "dy w, dy^T x")


class _Logits(torch.autograd.Function):
    """The product of wide copies, of which backward keeps none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        return wide_product_gradients(grad, *ctx.saved_tensors, *ctx.needs_input_grad[:2])


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x w^T + bias `[.., E]` in fp32 at least, of x `[.., H]`, weight `[E, H]` and bias `[E]` or None. The
    bits do not depend on the number of rows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    made = linear(x.to(wide), weight.to(wide), None) if is_apart() else _Logits.apply(x, weight)
    return made if bias is None else made + bias.to(wide)


def _ranked(scores: Tensor, count: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


# scores `[.., E]`, count: the indices int64 `[.., count]` of the largest, of equal ones the smaller index first.
ranked = Operation("ranked", _ranked, "indices of the largest scores")


def scores_of(logits: Tensor, rule: Routing, correction: Tensor | None) -> Tensor:
    """Return the scores `[.., E]` by which logits `[.., E]` choose."""
    if rule.score != "sigmoid" and correction is None:
        return logits  # whose order softmax keeps
    scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
    return scores if correction is None else scores + correction


def choose(logits: Tensor, rule: Routing, correction: Tensor | None = None) -> Tensor:
    """Return the experts int64 `[.., k]` that the logits `[.., E]` choose. correction: fp32 `[E]`, added to the scores
    for the choice alone."""
    scores = scores_of(logits.detach(), rule, correction)
    if rule.open_groups < rule.groups:
        scores = _of_open_groups(scores, rule)
    return ranked(scores, rule.chosen)


def _of_open_groups(scores: Tensor, rule: Routing) -> Tensor:
    """Return the scores, those of the experts of closed groups -infinity."""
    grouped = scores.unflatten(-1, (rule.groups, -1))
    best = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    opened = ranked(best, rule.open_groups)
    closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, opened, False)
    return grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)


def weigh(logits: Tensor, experts: Tensor, rule: Routing) -> Tensor:
    """Return the weights `[.., k]` of the chosen experts int64 `[.., k]`. Each expert is chosen once, so that no two
    addends of a gradient meet."""
    own = logits.gather(-1, experts)
    if rule.score == "sigmoid":
        weights = own.sigmoid()
        if rule.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
    elif rule.normalised or rule.score == "softmax_of_chosen":  # which are the same
        weights = F.softmax(own, -1)
    else:
        # Not by `logsumexp`, whose sums on a GPU have an order that depends on the number of rows.
        weights = F.softmax(logits, -1).gather(-1, experts)
    return weights if rule.factor == 1 else weights * rule.factor
