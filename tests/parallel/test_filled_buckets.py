"""Gradients that products of experts add to sums over micro-batches have the bits of those that are added later."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.ops.experts.products import ADD_OUTER, grouped_linear
from dtgpt.parallel.collectives import FlatSum
from dtgpt.parallel.expert_parallel import filled_buckets
from dtgpt.parallel.expert_parallel.filled_buckets import FilledBucket
from tests.models.moe.test_plans import ADAMW, MANY, OLMOE
from tests.support.bodies_experts import gradients_by
from tests.support.interpreter import needs_triton, run_interpreted
from tests.support.ranks import pool
from tests.support.runs import on_cuda, training


@pytest.fixture
def summed_by_products(monkeypatch) -> Iterator[list[nn.Parameter]]:
    """As on a GPU with a kernel: by the operation's definition."""
    found: list[nn.Parameter] = []

    def gains(parameter: nn.Parameter) -> bool:
        found.extend([parameter] if parameter.dim() == 3 else [])
        return parameter.dim() == 3

    monkeypatch.setattr(filled_buckets, "gains", gains)
    yield found


def gradients_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Two steps, the second of which finds the first one's sums."""
    trainer = training(recipe)
    trainer.train_step()
    trainer.gradients()
    return {shard.name: trainer.gradient(shard) for shard in trainer.shards}


@pytest.mark.slow(8)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [OLMOE, MANY], ids=["olmoe", "many"])
def test_products_add_gradients_with_the_bits_of_a_pass_of_its_own(recipe, request, model, recompute):
    recipe = replace(
        recipe, model=model, optimizer=ADAMW, precision="bf16", recompute=recompute, steps=2, micro_batch_size=1,
        global_batch_size=3,
    )  # fmt: skip
    expected = gradients_of(recipe)
    found = request.getfixturevalue("summed_by_products")
    gradients = gradients_of(recipe)
    assert found and gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.slow(3)
@pytest.mark.parametrize("plan", ["dp2_ep2", "dp2_ep2_tp2", "dp2_ep2_pp2"])
def test_products_add_gradients_of_the_experts_of_a_rank(recipe, plan):
    recipe = replace(
        recipe, model=replace(OLMOE, num_experts=8), optimizer=ADAMW, precision="bf16", steps=2, micro_batch_size=1,
        global_batch_size=6, plan=plan,
    )  # fmt: skip
    world = parse_plan(plan).world
    for apart, found in zip(*(pool().run(world, gradients_by, recipe, fills) for fills in (False, True)), strict=True):
        assert apart.keys() == found.keys()
        assert [name for name in apart if not torch.equal(apart[name], found[name])] == []


def test_a_pass_that_multiplies_twice_by_the_same_experts_is_refused(summed_by_products):
    stack, other = (nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16)) for shape in ((2, 4, 3), (2,)))
    made = FilledBucket([stack, other], FlatSum(torch.zeros(26), None), passes=2, hooks=True)
    made.begin()
    x, ends = torch.ones(5, 3, dtype=torch.bfloat16), torch.tensor([2, 5], dtype=torch.int32)
    total = sum(grouped_linear(x, stack, None, ends).sum() for _ in range(2))
    with pytest.raises(ValueError, match="multiplies twice"):
        total.backward()


def test_a_gradient_that_no_product_has_added_is_added_as_others_are(summed_by_products):
    """A compiled block computes without totals."""
    stack, other = (nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16)) for shape in ((2, 4, 3), (2,)))
    made = FilledBucket([stack, other], FlatSum(torch.zeros(26), None), passes=3, hooks=True)
    for step in range(2):
        made.begin()
        for factor in (1.0, 2.0, 3.0):
            (stack.sum() * factor + other.sum() * 2 * factor).backward()
        assert made.done == 3 and [total.unique().tolist() for total in made.sums] == [[6.0], [12.0]], step


SIZES = [37, 0, 128, 5]  # rows of experts: no whole tile of terms, none, two, few


def check_add_outer(device: str, dtype: torch.dtype, add: Callable[..., None], tolerance: float) -> None:
    """Rows behind the last one may be anything. Totals are set, then added to."""
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(sum(SIZES) + 9, size, generator=generator).to(device, dtype) for size in (256, 128))
    dy[sum(SIZES) :], x[sum(SIZES) :] = torch.nan, torch.nan
    ends = torch.tensor(SIZES).cumsum(0).int().to(device)
    expected, found = (torch.full((len(SIZES), 256, 128), torch.nan, device=device) for _ in range(2))
    for first in (True, False):
        ADD_OUTER.definition(dy, x, ends, expected, first)
        add(dy, x, ends, found, first)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


INTERPRETED = """
import torch
from dtgpt.ops.kernels.outer_kernels import add_outer
from tests.parallel.test_filled_buckets import check_add_outer
check_add_outer("cpu", torch.float32, add_outer, 1e-4)
check_add_outer("cpu", torch.float16, add_outer, 0.04)
"""


@needs_triton
def test_the_kernel_adds_what_the_definition_does_in_the_interpreter():
    run_interpreted(INTERPRETED)


@pytest.mark.cuda
def test_the_kernel_has_the_bits_of_products_that_are_added_later():
    check_add_outer("cuda", torch.bfloat16, ADD_OUTER, 0.0)


@pytest.mark.cuda
def test_captured_steps_have_the_bits_of_sums_that_are_made_later(recipe, monkeypatch):
    model = replace(OLMOE, hidden_size=128, ffn_hidden_size=128, head_dim=32)
    recipe = on_cuda(
        replace(recipe, model=model, precision="bf16", micro_batch_size=1, global_batch_size=3), model={}, steps=4
    )
    assert all(torch.equal(a, b) for a, b in zip(*by_both_ways(recipe, monkeypatch), strict=True))


def by_both_ways(recipe: Recipe, monkeypatch) -> Iterator[list[torch.Tensor]]:
    """Return the losses and weights of steps whose products add up gradients, and of some whose do not."""
    for gains in (filled_buckets.gains, lambda parameter: False):
        monkeypatch.setattr(filled_buckets, "gains", gains)
        trainer = training(recipe)
        losses = [trainer.train_step().loss for _ in range(recipe.steps)]
        yield [*losses, *(shard.local for shard in trainer.shards)]
