"""Rows of experts under sequence parallelism: each is added up for the rank alone that goes on with its token.

All ranks have the rows of all tokens, but what follows of a token is one rank's. So of each row that rank alone gets
the sum over the ranks, by half the bytes of a sum that all get; on the others it is zero, and nobody reads what they
make of it. What all ranks do need, the gradients of a router's weights, comes from the owners.

Shapes: N tokens of B samples, k slots of a token, M = N k rows, g ranks.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dtgpt.ops.experts.routing import Choice
from dtgpt.ops.experts.rows import gathered, sorted_rows, summed
from dtgpt.parallel.more_pieces.stacks import Entered, Summed
from dtgpt.parallel.tensor import ActivationLayout


class Products(Protocol):
    """The experts of a block: what they make of rows, an addend on each rank."""

    count: int

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return what they make of rows `[M, H]`."""


class Owners(NamedTuple):
    """Which rank goes on with which tokens: of each sample with its part of the positions. rows: how parts of rows lie
    on the ranks, one behind the other; tokens: how parts of `[B, T, ..]` do."""

    rows: ActivationLayout
    tokens: ActivationLayout

    @property
    def _ranks(self) -> tuple[int, int]:
        return self.rows.mesh.size(), self.rows.mesh.get_local_rank()

    def by_owner(self, places: Tensor) -> Tensor:
        """Return the rows `[g, M / g]` of each owner, from the row of each slot, int64 `[B, T, k]`."""
        ranks, _ = self._ranks
        return places.unflatten(1, (ranks, -1)).movedim(1, 0).reshape(ranks, -1)

    def sum_rows(self, sent: Tensor, addends: Tensor) -> Tensor:
        """Return the sums over the ranks of this rank's rows, and zeros for all others, in the place of the addends
        `[M, H]`. sent: the rows of each owner."""
        own = self.rows.sum(addends.index_select(0, sent.flatten()))
        return addends.zero_().index_copy_(0, sent[self._ranks[1]], own).view_as(addends)

    def own_of_all(self, of_tokens: Tensor) -> Tensor:
        """Return `[B, T, k]` of what each owner has of its tokens."""
        ranks, place = self._ranks
        return self.tokens.gather(of_tokens.chunk(ranks, 1)[place].contiguous())


class _OfOwners(torch.autograd.Function):
    """Weights `[B, T, k]` as they are. Their gradients are those of the owners, who alone have what makes them."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, owners: Owners) -> Tensor:
        ctx.owners = owners
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.owners.own_of_all(grads[0]), None


def sums_of_owners(experts: Products, owners: Owners, x: Tensor, choice: Choice) -> Tensor:
    """Return the sums `[N, H]` of tokens x `[B, T, H]` over their experts: those of this rank's tokens, and zeros."""
    order = sorted_rows(choice.experts.flatten(0, 1), experts.count)
    add = partial(owners.sum_rows, owners.by_owner(order.places.view_as(choice.experts)))
    made = experts.products(Entered.apply(gathered(x.flatten(0, 1), order), add), order.ends)
    return summed(Summed.apply(made, add), _OfOwners.apply(choice.weights, owners).flatten(0, 1), order)
