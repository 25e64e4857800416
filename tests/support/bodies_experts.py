"""What ranks do in tests of expert parallelism."""

from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.models.moe import mixture
from dtgpt.ops.experts.routing import Routing
from dtgpt.parallel.expert_parallel.exchange import SpreadExperts
from dtgpt.train.setup import open_trainer


class Step(NamedTuple):
    """A step as a rank sees it: loss, norm, and on rank 0 the whole gradients; then what the run says of held-out
    samples, and how many rows came to the experts of this rank, in each of the calls."""

    loss: float
    norm: float
    gradients: dict[str, Tensor | None]
    held_out: float
    rows: list[int]


def step_of(recipe: Recipe) -> Step:
    """Take a step of the recipe in which every token chooses the first experts."""
    from dtgpt.compare.whole_tensors import gather_whole

    rows: list[int] = []
    products = mixture.Experts.products

    def counted(experts: mixture.Experts, x: Tensor, ends: Tensor) -> Tensor:
        rows.append(len(x))
        return products(experts, x, ends)

    with (
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
