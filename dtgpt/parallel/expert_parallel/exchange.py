"""Rows of tokens, on the way to the ranks that hold their experts and back.

Each rank sorts the rows of its own tokens by (expert, token), as on one process, and adds what comes back in the order
of slots: the sums of a token do not know where its experts are. In between, an all-to-all takes the rows to the experts
and another one back. How many go where, the host asks: shapes follow from the choices of tokens. A rank may get all
rows, or none.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Products = Callable[[Tensor, Tensor], Tensor]  # rows `[M, H]` and the end of each expert's int32 -> `[M, H]`
Move = Callable[[Tensor], Tensor]


class _Moved(torch.autograd.Function):
    """Rows that are elsewhere, whose gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, go: Move, come: Move) -> Tensor:
        ctx.come = come
        return go(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.come(grad), None, None


class Route:
    """Where rows of this rank's tokens go, and which rows come to its experts.

    parts: of what `there` returns: how many rows, and int32 where those of each expert of this rank end among them.
    """

    def __init__(self, ends: Tensor, group: dist.ProcessGroup, apart: bool):
        """ends: int32 `[E]`, the row behind the last one of each of all experts. apart: the rows of each rank stay
        together, a part of each; else those of each expert do, in one part."""
        self.group, ranks = group, group.size()
        leaving = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)  # of each rank's experts
        coming = torch.empty_like(leaving)  # from each rank
        dist.all_to_all_single(coming, leaving, group=group)
        self.sent, self.received = torch.stack((leaving.sum(1), coming.sum(1))).tolist()
        self.parts = list(zip(self.received, coming.cumsum(1).int(), strict=True))
        self.order: Tensor | None = None
        if apart:
            return
        # Rows come by (rank, expert, token) and lie by (expert, rank, token).
        known = torch.arange(coming.shape[1], device=ends.device).repeat(ranks)
        of_rows = known.repeat_interleave(coming.flatten(), output_size=sum(self.received))
        self.order = of_rows.argsort(stable=True)
        self.places = torch.empty_like(self.order)
        self.places[self.order] = torch.arange(len(self.order), device=ends.device)
        self.parts = [(len(self.order), coming.sum(0).cumsum(0).int())]

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks that go to experts of this one."""
        arrived = self._exchange(rows, self.sent, self.received)
        return arrived if self.order is None else arrived[self.order]

    def back(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's tokens, of those that experts have made in the order of `there`."""
        return self._exchange(rows if self.order is None else rows[self.places], self.received, self.sent)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self.group)
        return arrived


class SpreadExperts:
    """The products of experts of which the ranks of a group hold some each. apart: those of each rank's rows by
    themselves, with the bits of one process, where the gradient of a weight has an addend for each rank, too."""

    def __init__(self, products: Products, group: dist.ProcessGroup, apart: bool):
        self.products, self.group, self.apart = products, group, apart

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return what the experts make of rows `[M, H]`. ends: int32 `[E]`, the row behind the last one of each."""
        route = Route(ends, self.group, self.apart)
        parts = _Moved.apply(rows, route.there, route.back).split([count for count, _ in route.parts])
        made = [self.products(part, last) for part, (_, last) in zip(parts, route.parts, strict=True)]
        return _Moved.apply(torch.cat(made) if self.apart else made[0], route.back, route.there)
