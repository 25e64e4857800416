"""The tokens of a group of ranks, gathered, of which each rank computes the rows of its own experts.

All shapes are static, so that the host asks nothing and a step is captured: each rank has room for the most rows that
can come to its experts, and those that do not are skipped. On the way back, each rank adds the rows of its experts for
each token, in the order of slots, in fp32, and the owner gets the sum over the ranks. Gradients come as the tokens did:
the owner's gradient is gathered, a row's is made where the row is, and those of a token are added as its rows were.

Where sums must not know where experts are, each token gets a row for each of its slots instead, which its owner adds
in the order of slots: for two ranks and 8 slots of bf16, four times the bytes.

Shapes: g ranks, N tokens of each, k slots of a token, of which s at most have experts of one rank.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.models.binding import bind
from dtgpt.models.moe.mixture import Experts
from dtgpt.ops.experts.routing import Choice
from dtgpt.ops.experts.rows import (
    Order,
    plain_on_cpu,
    sorted_rows,
    spread_rows,
    sum_of_rows,
    weighted_rows,
    weighted_rows_gradients,
)
from dtgpt.util.shared.torch_private import group_of_name
from dtgpt.util.torch_private import all_gather_single, reduce_scatter_single


class Group(NamedTuple):
    """Ranks that hold other experts each. name: of their process group; empty where tensors have no memory."""

    ranks: int
    place: int
    name: str


def _gather(x: Tensor, ranks: int, group: str) -> Tensor:
    every = x.new_empty(ranks * len(x), *x.shape[1:])
    if not x.is_meta:
        all_gather_single(every, x.contiguous(), group_of_name(group))
    return every


def _exchange(x: Tensor, group: str) -> Tensor:
    arrived = x.new_empty(x.shape)
    if not x.is_meta:
        dist.all_to_all_single(arrived, x.contiguous(), group=group_of_name(group))
    return arrived


def _scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    own = x.new_empty(len(x) // ranks, *x.shape[1:])
    if not x.is_meta:
        reduce_scatter_single(own, x.contiguous(), group_of_name(group))
    return own


_gather_op = torch.library.custom_op("dtgpt::gather_tokens", _gather, mutates_args=())
_gather_op.register_fake(lambda x, ranks, group: x.new_empty(ranks * x.shape[0], *x.shape[1:]))
_exchange_op = torch.library.custom_op("dtgpt::exchange_rows", _exchange, mutates_args=())
_exchange_op.register_fake(lambda x, group: x.new_empty(x.shape))
_scatter_op = torch.library.custom_op("dtgpt::sum_of_ranks", _scatter, mutates_args=())
_scatter_op.register_fake(lambda x, ranks, group: x.new_empty(x.shape[0] // ranks, *x.shape[1:]))
gather = plain_on_cpu(_gather, _gather_op)  # x [n, ..] of each rank -> [g n, ..], on all
exchange = plain_on_cpu(_exchange, _exchange_op)  # x [g n, ..] -> the n rows that each rank has for this one
scatter = plain_on_cpu(_scatter, _scatter_op)  # x [g n, ..] -> this rank's n rows of the sum over the ranks


class Route(NamedTuple):
    """Where rows are, R of them: the first of each rank's part are sorted by (expert, token), the rest are nobody's."""

    tokens: Tensor  # int64 [R]: the token of each row, among all g N
    slots: Tensor  # int64 [R]: its slot, among all g N k
    places: Tensor  # int64 [g N, k]: the row of each slot; -1: it has none here
    ends: Tensor  # int32 [parts, E / g]: the row of a part behind the last one of each expert
    sent: Tensor  # int64 [g N s]: the row that goes back, of each token and each of its slots that has one here
    back: Tensor  # int64 [N, k]: where the row of each own slot is among those that come back

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return self.tokens, self.slots, self.places


def route_of(own: Tensor, group: Group, count: int) -> Route:
    """Return the route of tokens that have chosen the experts `own` int64 `[N, k]`, of `count` on each rank. Those of
    each rank are a part, sorted by itself."""
    (tokens, slots), most, parts = own.shape, most_rows(own.shape[1], count), group.ranks
    every = gather(own, group.ranks, group.name)
    local = torch.where(every // count == group.place, every % count, count).view(parts, -1)
    by_expert, order = local.sort(dim=1, stable=True)
    ends = torch.searchsorted(
        by_expert, torch.arange(count, device=own.device).repeat(parts, 1), right=True, out_int32=True
    )
    number, room = local.shape[1], local.shape[1] // slots * most
    part, each = (torch.arange(size, device=own.device) for size in (parts, number))
    places = torch.empty_like(order).scatter_(1, order, each.repeat(parts, 1)) + room * part[:, None]
    places = torch.where(local < count, places, -1).view_as(every)
    taken = (order[:, :room] + number * part[:, None]).flatten()
    first = (places >= 0).to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
    holder = own // count
    before = (holder[:, :, None] == holder[:, None, :]).tril(-1).sum(-1)  # slots with experts of the same rank
    back = (holder * tokens + torch.arange(tokens, device=own.device)[:, None]) * most + before
    return Route(taken // slots, taken, places, ends, places.gather(1, first).clamp(min=0).flatten(), back)


def most_rows(slots: int, count: int) -> int:
    """Return how many rows of a token can come to a rank that holds `count` experts."""
    return min(slots, count)


class _Rows(torch.autograd.Function):
    """Rows of gathered tokens, of whose gradients each owner gets those of its tokens, and adds them by slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, sent: Tensor, back: Tensor, ranks: int, group: str) -> Tensor:
        ctx.save_for_backward(sent, back)
        ctx.group = group
        return gather(x, ranks, group).index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sent, back = ctx.saved_tensors
        return sum_of_rows(exchange(grad.index_select(0, sent), ctx.group), back), None, None, None, None, None


class _Summed(torch.autograd.Function):
    """The sums of each token, of rows that other ranks have made, too. The gradient of a row is made where it is."""

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, weights: Tensor, sent: Tensor, back: Tensor, ranks: int, group: str, *arrays: Tensor
    ) -> Tensor:
        ctx.save_for_backward(made, weights, back, *arrays)
        ctx.ranks, ctx.group = ranks, group
        return weighted_rows(exchange(made.index_select(0, sent), group), weights, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        made, weights, back, tokens, slots, places = ctx.saved_tensors
        every = (gather(each, ctx.ranks, ctx.group) for each in (grad.contiguous(), weights))
        dmade, dweights = weighted_rows_gradients(next(every), made, next(every), places, tokens, slots)
        holder = back.div(len(made) // ctx.ranks, rounding_mode="floor")
        of_ranks = exchange(dweights, ctx.group).view(ctx.ranks, *weights.shape)
        return dmade, of_ranks.gather(0, holder[None])[0], None, None, None, None, None, None, None


def order_of(own: Tensor, group: Group, count: int) -> Order:
    """Return where the rows of all tokens are, of those of `count` experts that are here; own: as of `route_of`."""
    every, room = gather(own, group.ranks, group.name), group.ranks * len(own) * most_rows(own.shape[1], count)
    local = every - group.place * count
    local = torch.where((local < 0) | (local >= count), count, local)
    tokens, slots, places, ends = sorted_rows(local, count + 1)
    return Order(tokens[:room], slots[:room], torch.where(local < count, places, -1), ends[:count])


class UnderWay:
    """A tensor `[n, ..]` of each rank on its way to all, and later its gradient on the way back: on a GPU beside what
    is computed meanwhile. Who reads what `gather` or `scatter` returns waits first."""

    def __init__(self, group: Group):
        self.group = group
        self._work: dist.Work | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Return `[g n, ..]`."""
        ranks, _, name = self.group
        if not x.is_cuda or torch.compiler.is_compiling():
            return gather(x, ranks, name)
        every = x.new_empty(ranks * len(x), *x.shape[1:])
        self._work = all_gather_single(every, x.contiguous(), group_of_name(name), async_op=True)
        return every

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's `[n, ..]` of the sum over the ranks of x `[g n, ..]`."""
        ranks, _, name = self.group
        if not x.is_cuda or torch.compiler.is_compiling():
            return scatter(x, ranks, name)
        own = x.new_empty(len(x) // ranks, *x.shape[1:])
        self._work = reduce_scatter_single(own, x.contiguous(), group_of_name(name), async_op=True)
        return own

    def wait(self) -> None:
        """Hold the current stream until it has arrived."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class Begun(NamedTuple):
    """What `begin` has sent. stand_in: of the shape of what was sent; its gradient is what travels back."""

    every: Tensor  # of all ranks
    stand_in: Tensor
    way: UnderWay


class _ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: UnderWay) -> tuple[Tensor, Tensor]:
        every = way.gather(x)
        ctx.way, ctx.dtype = way, x.dtype
        ctx.mark_non_differentiable(every)
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(x.dtype, torch.float32)
        return every, x.new_empty([1] * x.dim(), dtype=wide).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.way.wait()
        return grad.to(ctx.dtype), None


def begin(x: Tensor, group: Group) -> Begun:
    """Send x to all ranks."""
    way = UnderWay(group)
    every, stand_in = _ToAll.apply(x, way)
    return Begun(every, stand_in, way)


class _RowsHere(torch.autograd.Function):
    """The rows of gathered tokens, of whose gradients a token's are added here, and then over the ranks."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, every: Tensor, way: UnderWay, order: Order) -> Tensor:
        ctx.save_for_backward(order.places)
        ctx.way = way
        way.wait()
        return spread_rows(every, order.places, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return ctx.way.scatter(weighted_rows(grad.contiguous(), None, places, True)), None, None, None


class _Kept(torch.autograd.Function):
    """What the sums of rows are made of, and kept for their gradient: a function of its own, so that where it is made
    again in backward the sums are not. Returns what stands for the sums of all tokens."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, stand_in: Tensor, every: Tensor, way: UnderWay, order: Order) -> Tensor:
        way.wait()
        ctx.save_for_backward(made, every, order.places, order.tokens, order.slots)
        ctx.way = way
        return made.new_empty(1, 1).expand(len(every), made.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dmade, dweights = weighted_rows_gradients(grad, *ctx.saved_tensors)
        return dmade, ctx.way.scatter(dweights), None, None, None


class _SummedHere(torch.autograd.Function):
    """The sums of each token over its rows here, and then over the ranks."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, made: Tensor, every: Tensor, places: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return scatter(weighted_rows(made, every, places, True), group.ranks, group.name).to(made.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gather(grad, ctx.group.ranks, ctx.group.name), None, None, None, None


class GatheredExperts:
    """The products of experts of which the ranks of a group hold some each. apart: those of each rank's tokens by
    themselves, with the bits of one process, where the gradient of a weight has an addend for each rank, too."""

    def __init__(self, experts: Experts, group: Group, apart: bool):
        self.products, self.count = experts.products, experts.count // group.ranks
        self.group, self.apart = group, apart

    def begin(self, x: Tensor) -> Begun | None:
        """Send tokens x `[.., H]` on their way before they have chosen."""
        return None if self.apart else begin(x.flatten(0, -2), self.group)

    def __call__(self, x: Tensor, choice: Choice, begun: Begun | None = None) -> Tensor:
        """Return the sums `[N, H]` of tokens x `[.., H]`, N of them, by their choice `[.., k]` of all experts. begun:
        what `begin` has returned."""
        if begun is None:
            return self._apart(x.flatten(0, -2), choice.flat())
        choice = choice.flat()
        order, weights = order_of(choice.experts, self.group, self.count), begin(choice.weights, self.group)
        rows = _RowsHere.apply(begun.stand_in, begun.every, begun.way, order)
        made = self.products(rows, order.ends, filled=False)
        stand_in = _Kept.apply(made, weights.stand_in, weights.every, weights.way, order)
        return _SummedHere.apply(stand_in, made, weights.every, order.places, self.group)

    def _apart(self, x: Tensor, choice: Choice) -> Tensor:
        ranks, _, name = self.group
        route = route_of(choice.experts, self.group, self.count)
        rows = _Rows.apply(x, route.tokens, route.sent, route.back, ranks, name)
        parts = zip(rows.chunk(ranks), route.ends.unbind(), strict=True)
        whole = torch.cat([self.products(part, ends, filled=False) for part, ends in parts])
        return _Summed.apply(whole, choice.weights, route.sent, route.back, ranks, name, *route.arrays)


def bind_gathered(experts: Experts, group: Group, apart: bool) -> None:
    """Let experts compute the tokens of a group of ranks."""
    made = GatheredExperts(experts, group, apart)
    bind(experts, run=made, into=made.begin)


def cut_experts(block: nn.Module, ranks: int, apart: bool) -> None:
    """Let the mixtures of a block without memory compute as on one of `ranks`, by which planning measures what it
    keeps."""
    for experts in (each for each in block.modules() if isinstance(each, Experts)):
        for stack in experts.children():
            for name, whole in list(stack.named_parameters(recurse=False)):
                setattr(stack, name, nn.Parameter(whole.detach().chunk(ranks)[0]))
        bind_gathered(experts, Group(ranks, 0, ""), apart)
