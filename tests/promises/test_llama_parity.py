"""Change the plan, keep the curve, for LLaMA: dropout, documents, accumulation and norms of heads are on in every case.

A few plans stand for the table of `test_parity.py`, which holds all of them for GPT-2: every kind of cut, schedule and
ZeRO level is in one of them at least.
"""

from dataclasses import replace

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtgpt.compare.verdict import difference, limits_of, problems
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.parallel.context_parallel.degrees import ranks_of_queries
from tests.support.bodies_llama import Seen, train_and_evaluate
from tests.support.ranks import pool
from tests.support.runs import change
from tests.support.runs import record as record_of

pytestmark = pytest.mark.slow(11)

TOLERANCE = 1e-5  # as for GPT-2
STEPS = 2
CASES = [  # plan, tied; the random cases of each week (tests/compare) draw from all plans
    ("tp2_pp2", False), ("dp2_pp2_zbv_zero3", False), ("cp2_zero2", False),
    ("tp2_sp", True), ("pp2_gpipe", True), ("dp2_tp2_sp_zero3", True),
]  # fmt: skip
RARE = [
    ("tp4_sp", False), ("dp2_zero2", False), ("dp2_tp2_sp_pp2_zero3_interleaved", False),
    ("cp2_tp2_sp", False), ("cp4_zero3", True), ("dp2_cp2_pp2_zbv", True),
    ("tp4", True), ("pp4_zbv", True), ("dp2_zero1", True), ("tp2_sp_pp2_zbv", True),
]  # fmt: skip
GATHERED = [("cp4_zero3", 1), ("cp4", 2), ("cp2_tp2_sp", 2), ("cp2_pp2_zbv", 1)]  # plan, heads of keys and values
NARROW = ["dp2", "tp2_sp", "pp2_zbv"]


@pytest.fixture
def recipe(recipe, documents) -> Recipe:
    marks = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    data = DataConfig(path=str(documents), tokenizer="bytes", **marks)
    optimizer = OptimizerConfig(lr=3e-3, warmup=2)
    # With this seed, each part of a sample changes the first loss by more than plans may differ.
    return replace(recipe, data=data, optimizer=optimizer, steps=STEPS, micro_batch_size=2, seed=5)


def sized_for(recipe: Recipe, plan: Plan, tied: bool) -> Recipe:
    """As many layers and micro-batches as the plan needs; heads whose size is not hidden_size / num_heads. Rotary
    positions are relative: those of a document change something only where tokens attend to other documents."""
    model = LlamaConfig(
        num_layers=max(2, plan.num_stages), hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12,
        ffn_hidden_size=44, seq_length=32, vocab_size=257, dropout=0.1, tied=tied, qk_norm=True, norm_eps=1e-6,
        rope_theta=100.0, rope_factor=4.0, rope_original_length=16, init_std=0.05,
    )  # fmt: skip
    recipe = replace(recipe, data=replace(recipe.data, reset_attention_mask=not tied))
    return replace(recipe, model=model, global_batch_size=2 * (plan.dp or 1) * max(2, plan.pp))


references: dict[tuple, Seen] = {}


def reference(recipe: Recipe) -> Seen:
    """What one process does."""
    key = recipe.model, recipe.global_batch_size, recipe.precision
    if key not in references:
        references[key] = train_and_evaluate(replace(recipe, plan="single"), STEPS)
    return references[key]


def run(recipe: Recipe, plan: Plan) -> list[Seen]:
    recipe = replace(recipe, plan="under test", plans={"under test": plan})
    return pool().run(plan.world, train_and_evaluate, recipe, STEPS)


def check(recipe: Recipe, plan: Plan, limit: float = TOLERANCE) -> None:
    """Hold a plan's curve, weights, held-out loss, text and memory to one process, the first step to `limit`."""
    seen, expected = run(recipe, plan), reference(recipe)
    found = difference(seen[0].record, expected.record)
    assert found.within(TOLERANCE, TOLERANCE), found
    assert max(*found.losses, found.worst("first gradient")[0]) < limit
    for rank in seen:
        assert rank.held_out == pytest.approx(expected.held_out, rel=TOLERANCE)
        assert rank.sample == expected.sample and rank.held == rank.planned


@pytest.mark.parametrize(("plan", "tied"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in RARE)])
def test_the_plan_follows_one_process(recipe, plan, tied):
    plan = parse_plan(plan)
    check(sized_for(recipe, plan, tied), plan)


@pytest.mark.parametrize(("plan", "groups"), GATHERED)
def test_more_context_ranks_than_heads_of_keys_follow_one_process(recipe, plan, groups):
    plan = parse_plan(plan)
    recipe = sized_for(recipe, plan, tied=False)
    model = replace(recipe.model, num_heads=4, num_kv_heads=groups)
    recipe = replace(recipe, model=model, recompute="selective" if plan.tp > 1 else "full" if plan.zero else "none")
    assert ranks_of_queries(plan, model) > 1
    check(recipe, plan, limit=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", NARROW)
def test_a_plan_in_16_bits_follows_one_process_in_16_bits(recipe, plan, precision):
    plan = parse_plan(plan)
    recipe = sized_for(recipe, plan, tied=False)
    recipe = replace(recipe, precision=precision, loss_scale=LossScaleConfig(initial=2.0**12))
    found, expected = run(recipe, plan)[0].record, reference(recipe).record
    moved = difference(record_of(replace(recipe, plan="single"), STEPS, moved=True), expected)
    assert problems(difference(found, expected), limits_of(found), [moved]) == []


OWN = {
    "blocks.0.attn.qkv": None,  # heads that every rank holds
    "blocks.0.attn.proj": None,
    "blocks.1.attn.qkv": ColwiseParallel(output_layouts=Replicate()),  # heads that are gathered
    "blocks.1.attn.proj": None,
    "blocks.*.mlp.gate_up": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.mlp.down": None,
}


def test_a_table_of_the_recipe_follows_one_process(recipe):
    """Also its text: the cache has as many heads as the rank."""
    recipe = sized_for(recipe, Plan(tp=2), tied=False)
    seen, expected = run(recipe, Plan(dp=1, tp=2, table=OWN)), reference(recipe)
    found = difference(seen[0].record, expected.record)
    assert found.within(TOLERANCE, TOLERANCE), found
    assert seen[0].sample == expected.sample


def test_what_the_plans_are_held_against_has_all_parts(recipe):
    """Documents, dropout and the norms of heads change the curve; every gradient is there."""
    recipe = sized_for(recipe, Plan(), tied=True)
    record = reference(recipe).record
    gradients = {name: t for name, t in record.tensors.items() if name.startswith("first gradient/")}
    assert len(gradients) == 2 * 8 + 2 and all(t.norm() > 0 for t in gradients.values())
    changes = [{"data": {"reset_position_ids": False}}, {"data": {"reset_attention_mask": True}}]
    changes += [{"data": {"eod_mask_loss": False}}, {"model": {"dropout": 0.0}}, {"model": {"qk_norm": False}}]
    for changed in changes:
        losses = record_of(change(recipe, plan="single", **changed), 1).losses
        assert abs(losses[0] - record.losses[0]) > 1e-4 * losses[0], changed
