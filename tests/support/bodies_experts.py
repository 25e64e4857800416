"""What ranks do in tests of expert parallelism."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.config.recipe import Recipe
from dtgpt.models.layers import Context
from dtgpt.models.moe import mixture
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.ops.experts.products import ADD_OUTER, grouped_reference, outer_op
from dtgpt.ops.experts.routing import Choice, Routing
from dtgpt.parallel.expert_parallel import filled_buckets
from dtgpt.parallel.expert_parallel.exchange import SpreadExperts
from dtgpt.parallel.expert_parallel.gathered import GatheredExperts, Group
from dtgpt.posttrain.lora.adapters import Adapter, attach
from dtgpt.train.setup import open_trainer


class Step(NamedTuple):
    """A step as a rank sees it: loss, norm, and on rank 0 the whole gradients; then what the run says of held-out
    samples, and how many rows came to the experts of this rank, in each of the calls."""

    loss: float
    norm: float
    gradients: dict[str, Tensor | None]
    held_out: float
    rows: list[int]


def step_of(recipe: Recipe, asks: bool = False) -> Step:
    """Take a step of the recipe in which every token chooses the first experts. asks: the host for sizes."""
    from dtgpt.compare.whole_tensors import gather_whole

    rows: list[int] = []
    products = mixture.Experts.products

    def counted(experts: mixture.Experts, x: Tensor, ends: Tensor, filled: bool = True) -> Tensor:
        rows.append(int(ends[-1]))
        return products(experts, x, ends, filled)

    with (
        mock.patch.object(Plan, "asks_host", asks),
        mock.patch.object(mixture, "choose", _first),
        mock.patch.object(mixture.Experts, "products", counted),
        open_trainer(recipe) as trainer,
    ):
        loss = trainer.gradients()
        gradients = dict(gather_whole(trainer.shards, trainer.gradient))
        result = trainer.update(loss)
        held_out = trainer.held_out_loss()
        assert held_out is not None
        return Step(trainer.mean_loss(result), result.norm.item(), gradients, held_out[0], rows)


def _first(logits: Tensor, rule: Routing, correction: Tensor | None = None) -> Tensor:
    return torch.arange(rule.chosen, device=logits.device).expand(*logits.shape[:-1], -1)


def exchange(counts: Sequence[Sequence[int]], apart: bool) -> tuple[list[list[float]], Tensor, Tensor]:
    """Let each rank have so many rows of each expert, `[ranks][experts]`, of numbers rank.expert, which experts
    multiply by 10 (expert + 1). Return what came to the experts of this rank in each call; what came back, less what
    should have; and the gradient of the rows, less what it should be."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.tensor(counts[rank])
    experts = torch.arange(len(own)).repeat_interleave(own).double()
    rows = (rank + experts / 10)[:, None].requires_grad_()
    first, came = rank * len(own) // ranks, []

    def products(x: Tensor, ends: Tensor) -> Tensor:
        came.append(x[:, 0].tolist())
        held = torch.arange(len(ends)).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
        return x * (10 * (first + held + 1))[:, None]

    group = dist.group.WORLD
    assert group is not None
    made = SpreadExperts(products, group, apart)(rows, own.cumsum(0).int())
    factors = (10 * (experts + 1))[:, None]
    made.backward(torch.ones_like(made))
    assert rows.grad is not None
    return came, (made - rows * factors).detach(), rows.grad - factors


class _LeftOver(torch.autograd.Function):
    """A grouped product as kernels leave it: behind the last row is what was in memory, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        made = grouped_reference(x, weight, ends)
        made[int(ends[-1]) :] = torch.nan
        made[int(ends[-1]) :: 2] = 1  # a clamp has no gradient at NaN
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, ends = ctx.saved_tensors
        dx = grouped_reference(grad, weight.mT, ends)
        dx[int(ends[-1]) :] = torch.nan
        return dx, outer_op(grad, x, ends), None


def gradients_by(recipe: Recipe, fills: bool) -> dict[str, Tensor]:
    """Return this rank's gradients of a second step, which finds the first one's sums. fills: products of experts add
    theirs to totals, as on a GPU with a kernel."""
    added: list[bool] = []

    def add(dy: Tensor, x: Tensor, ends: Tensor, total: Tensor, first: bool) -> None:
        added.append(first)
        ADD_OUTER.definition(dy, x, ends, total, first)

    with (
        mock.patch.object(filled_buckets, "gains", lambda parameter: fills and parameter.dim() == 3),
        mock.patch("dtgpt.ops.experts.products.ADD_OUTER", add),
        open_trainer(recipe) as trainer,
    ):
        trainer.train_step()
        trainer.gradients()
        assert bool(added) is fills
        return {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}


class Mixed(NamedTuple):
    """Sums `[N, H]` of tokens, and the gradients of tokens, weights and the experts' parameters."""

    y: Tensor
    dx: Tensor
    dweights: Tensor
    dparameters: dict[str, Tensor]


def mixed(
    config: ExpertsConfig, choices: Tensor, dtype: torch.dtype, apart: bool, device: str = "cpu", adapted: bool = False
) -> tuple[Mixed, Mixed]:
    """Return what this rank, which holds some experts, makes of its tokens, of which `choices [ranks, N, k]` says the
    experts; and what one process does with all experts: with the tokens of this rank or, unless `apart`, of all."""
    rank, (ranks, tokens, slots) = dist.get_rank(), choices.shape
    own, width = slice(rank * tokens, (rank + 1) * tokens), config.num_experts // ranks
    generator, choices = torch.Generator().manual_seed(5), choices.to(device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x, towards = (drawn(ranks * tokens, config.hidden_size).to(dtype) for _ in range(2))
    weights = drawn(ranks * tokens, slots)
    whole = mixture.Experts(config).to(dtype)
    held = mixture.Experts(replace(config, num_experts=width)).to(dtype)
    held.count = config.num_experts
    for stack in (*whole.children(), *held.children()) if adapted else ():
        count, rows, columns = stack.get_parameter("weight").shape
        a, b = torch.empty(count, 3, columns, dtype=dtype), torch.empty(count, rows, 3, dtype=dtype)
        attach(stack, Adapter(a, b, torch.zeros(rows, dtype=torch.int64), 1, 2.5))
    for full, part in zip(whole.parameters(), held.parameters(), strict=True):
        full.data = drawn(*full.shape).to(dtype)
        part.data = full.data[rank * width : (rank + 1) * width].clone()

    def run(experts: mixture.Experts, call: Any, rows: slice) -> Mixed:
        given, factors = (each[rows].clone().requires_grad_() for each in (x, weights))
        y = call(given, Choice(choices.flatten(0, 1)[rows], factors))
        y.backward(towards[rows])
        gradients = {name: p.grad for name, p in experts.named_parameters()}
        return Mixed(y.detach(), given.grad, factors.grad, gradients)  # type: ignore[arg-type]

    group = dist.group.WORLD
    assert group is not None
    spread = GatheredExperts(held, Group(ranks, rank, group.group_name), apart)

    def call(x: Tensor, choice: Choice) -> Tensor:
        return spread(x, choice, spread.begin(x))

    if choices.is_cuda:
        left = [
            torch.full((size,), torch.nan, device=device) for size in (1 << 16, 1 << 17, 1 << 24) for _ in range(64)
        ]
        del left  # what kernels do not write is then NaN
        found = run(held, call, own)
    else:
        with mock.patch("dtgpt.ops.experts.products.grouped_product", _LeftOver.apply):
            found = run(held, call, own)
    first, alone = slice(rank * width, (rank + 1) * width), []
    size = tokens if apart else ranks * tokens
    for start in range(0, ranks * tokens, size):  # gradients of parameters have an addend for each part
        rows = slice(start, start + size)
        whole.zero_grad()
        alone.append(run(whole, whole.of_tokens, rows))
    y, dx, dweights = (torch.cat(parts)[own] for parts in list(zip(*alone, strict=True))[:3])
    sums = {n: sum(each.dparameters[n][first] for each in reversed(alone)) for n in alone[0].dparameters}
    return found, Mixed(y, dx, dweights, sums)


def kept_by_a_block(recipe: Recipe) -> int:
    """The bytes of what the first block keeps for backward, without its weights."""
    kept: dict[int, int] = {}
    with open_trainer(recipe) as trainer:
        block, config = trainer.stages[0].blocks["0"], recipe.model
        weights = {shard.local.untyped_storage().data_ptr() for shard in trainer.shards}
        x = torch.randn(recipe.micro_batch_size, config.seq_length, config.hidden_size, requires_grad=True)

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = block(x, Context(None))
        assert y.requires_grad
    return sum(kept.values())
