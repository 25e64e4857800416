"""Expert parallelism: the curve, gradients, weights, states and bits of one process, by rows that go to the ranks of
their experts; loads that are as uneven as can be; memory and messages; and what is refused."""

from dataclasses import replace

import pytest
import torch

from dtgpt.compare.fuzz.case import MODELS
from dtgpt.compare.fuzz.drawing import draw_case
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.inference.open import notes_on
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from dtgpt.parallel.layout import axes_of
from dtgpt.planning.search import _divisions
from dtgpt.planning.traffic import collectives_of, sent_bytes
from dtgpt.util.errors import UserError
from tests.support.bodies_exact import bits_of_steps
from tests.support.bodies_experts import Step, exchange, step_of
from tests.support.bodies_optimizer import Part, train_part
from tests.support.bodies_shards import CPU
from tests.support.example_mixture import ManyConfig
from tests.support.one_rank import build_rank, differences
from tests.support.ranks import pool

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
GROUPED = {**SHAPE, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden_size": 24, "num_experts": 8, "experts_per_token": 2}
OLMOE = OlmoeConfig(**GROUPED, dropout=0.1)
MANY = ManyConfig(**GROUPED, dropout=0.1)
ADAMW = OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4)  # so that gradients of rounding alone make no whole steps
HALF, STEPS = 1, 3


@pytest.fixture
def moe(recipe) -> Recipe:
    return replace(recipe, model=OLMOE, optimizer=ADAMW, steps=STEPS, micro_batch_size=2, global_batch_size=8)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return what gives the curve and the weights of one process, each made once."""
    made: dict[object, Part] = {}

    def of(recipe: Recipe) -> Part:
        key = recipe.model, recipe.optimizer, recipe.global_batch_size
        if key not in made:
            one = replace(recipe, plan="single", recompute="none")
            made[key] = train_part(one, tmp_path_factory.mktemp("one"), STEPS)
        return made[key]

    return of


def run(recipe: Recipe, plan: str, folder, last: int) -> list[Part]:
    return pool().run(parse_plan(plan).world, train_part, replace(recipe, plan=plan), folder, last)


@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        ("dp2_ep2", "dp4_ep2_zero3", {"recompute": "full"}),
        ("dp4_ep4_zero1", "dp2_ep2_pp2_zbv", {"model": MANY}),
        ("dp2_ep2_pp2_interleaved_zero1", "dp4_ep2_zero2", {}),
        ("dp2_ep2_pp2_gpipe", "dp2_zero3", {"recompute": "selective"}),
        ("dp4_ep2", "dp2_ep2_zero3", {"optimizer": MuonConfig(lr=5e-3, warmup=2)}),
        ("dp4_ep2_zero1", "dp2_ep2", {"optimizer": NorMuonConfig(lr=5e-3, warmup=2)}),
        ("pp4", "dp4_ep4", {"model": MANY}),
        ("dp2_ep2_tp2_sp", "cp2_ep2_zero1", {"model": MANY}),
        ("cp4_ep2", "dp2_ep2_tp2_zero3", {}),
    ],
)
def test_a_run_under_two_plans_follows_one_process(moe, expected, tmp_path, first, then, changes):
    """The second plan goes on from the checkpoint of the first, with its states."""
    recipe, losses = replace(moe, **changes), []
    whole = expected(recipe)
    for plan, last in ((first, HALF), (then, STEPS)):
        ranks = run(recipe, plan, tmp_path, last)
        losses += ranks[0].losses
        assert all(part.held[0] == part.planned[0] for part in ranks)
        assert recipe.optimizer.kind == "normuon" or all(part.held == part.planned for part in ranks)
    is_muon = "optimizer" in changes
    assert losses == pytest.approx(whole.losses, rel=1e-5 if is_muon else 1e-6)
    assert ranks[0].weights.keys() == whole.weights.keys()
    for name, weight in ranks[0].weights.items():
        torch.testing.assert_close(weight, whole.weights[name], rtol=1e-4, atol=3e-5 if is_muon else 1e-5)


@pytest.mark.slow(10)
@pytest.mark.parametrize("alike", [False, True], ids=["as chosen", "all alike"])
def test_gradients_and_their_norm_are_those_of_one_process(moe, alike):
    """Where all tokens choose the first experts, other ranks get no row, and their experts a gradient of zero."""
    recipe = replace(moe, model=MANY, global_batch_size=4, micro_batch_size=1)
    whole = step_of(replace(recipe, plan="single"), alike)
    for plan in ("dp2_ep2", "dp4_ep2_zero1", "dp4_ep2"):
        ranks: list[Step] = pool().run(parse_plan(plan).world, step_of, replace(recipe, plan=plan), alike)
        assert [r.loss for r in ranks] == pytest.approx([whole.loss] * len(ranks), rel=1e-6), plan
        assert [r.norm for r in ranks] == pytest.approx([whole.norm] * len(ranks), rel=1e-6), plan
        assert [r.held_out for r in ranks] == pytest.approx([whole.held_out] * len(ranks), rel=1e-6), plan
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(ranks[0].gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
        others = [rows for r in ranks[1::2] for rows in r.rows]
        assert (max(others) == 0) is alike
        assert sum(sum(r.rows) for r in ranks) >= sum(whole.rows)


@pytest.mark.slow(12)
@pytest.mark.parametrize(
    ("plans", "changes"),
    [
        (["dp2_ep2", "dp2_ep2_pp2_interleaved_zero3"], {}),
        (["dp3_ep3_zero3", "dp2_ep2_pp2_zero1"], {"precision": "bf16", "model": replace(OLMOE, num_experts=6)}),
        (["dp4_ep2", "dp4_ep2_zero2"], {"precision": "bf16", "micro_batch_size": 3, "model": MANY}),
        (["dp2_ep2_zero2"], {"precision": "bf16", "recompute": "full"}),
    ],
)
def test_exact_sums_have_the_same_bits_under_every_plan(moe, plans, changes):
    """Also of a single micro-batch, whose sums other parameters round as they are made."""
    shared = {"global_batch_size": 12, "reduce": "exact", "steps": 2}
    recipe = replace(moe, **shared | changes)
    whole = pool().run(1, bits_of_steps, replace(recipe, plan="single"))[0]
    assert len(set(whole.values())) > 30
    for plan in plans:
        found = pool().run(parse_plan(plan).world, bits_of_steps, replace(recipe, plan=plan))[0]
        assert [name for name in whole if found[name] != whole[name]] == [], plan


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("counts", [
    [[1, 2, 0, 3], [4, 0, 0, 1]], [[5, 0, 0, 0], [7, 0, 0, 0]], [[0, 0, 0, 0], [0, 1, 2, 0]],
    [[1, 0, 2], [0, 3, 0], [2, 2, 2]],
])  # fmt: skip
def test_rows_go_to_their_experts_and_back(counts, apart):
    ranks, each = len(counts), len(counts[0]) // len(counts)
    for rank, (came, back, gradient) in enumerate(pool().run(ranks, exchange, counts, apart)):
        held = range(rank * each, (rank + 1) * each)
        of_rank = [[source + e / 10 for e in held for _ in range(counts[source][e])] for source in range(ranks)]
        by_expert = [source + e / 10 for e in held for source in range(ranks) for _ in range(counts[source][e])]
        assert came == (of_rank if apart else [by_expert])
        assert not back.any() and not gradient.any()


BUILT = [
    ("dp2_ep2", "fp32"), ("dp4_ep2", "bf16"), ("dp2_ep2", "bf16"), ("dp4_ep2_zero1", "bf16"), ("dp4_ep4_zero3", "fp32"),
    ("dp4_ep2_tp2_sp_pp2_zero1", "bf16"), ("dp2_ep2_tp2_pp2", "bf16"), ("dp2_ep2_pp2_zbv", "bf16"),
    ("dp2_cp2_ep2_pp2_zero1", "fp32"),
]  # fmt: skip


@pytest.mark.slow(3)
@pytest.mark.parametrize("reduce", ["fast", "exact"])
@pytest.mark.parametrize(("plan", "precision"), BUILT)
def test_the_planner_knows_the_bytes_of_every_rank(moe, plan, precision, reduce):
    named = parse_plan(plan)
    if named.splits_backward and reduce == "exact":
        return
    recipe = replace(moe, plan=plan, precision=precision, reduce=reduce, micro_batch_size=1)
    settings = recipe.settings(named.for_world(named.world), CPU)
    for rank in range(settings.plan.world):
        assert differences(build_rank(settings, recipe.optimizer, rank), settings) == []


def test_messages_of_experts(moe):
    """Rows of even loads: forward there and back, backward the same, of 2 micro-batches in 4 blocks. The gradient of
    experts is summed over the 2 ranks that hold the same ones."""
    recipe = replace(moe, plan="dp4_ep2", micro_batch_size=1)
    settings = recipe.settings(recipe.plan_for(4), CPU)
    found = {(c.kind, c.over, c.apart): c for c in collectives_of(settings, 0)}
    rows = found["all-to-all", "ep", 1]
    assert rows.count == 2 * 4 * 4 and rows.bytes == rows.count * 16 * 2 * 32 * 4
    experts = 4 * 4 * 3 * 24 * 32  # elements of 4 experts in 4 blocks
    assert found["all-reduce", "dp", 2].bytes == 4 * experts
    rest = OLMOE.num_parameters - 2 * experts
    assert found["all-reduce", "dp", 1].bytes == 4 * rest
    assert sent_bytes(settings, 0)["dp"] == 4 * experts + 4 * rest * 1.5
    assert sent_bytes(settings, 0)["ep"] == rows.bytes / 2


def test_the_search_for_plans_spreads_experts():
    found = {(plan.dp, plan.pp, plan.ep) for plan, *_ in _divisions(OLMOE, 4, 16, cuts_samples=False) if plan.tp == 1}
    assert found == {(4, 1, 1), (4, 1, 2), (4, 1, 4), (2, 2, 1), (2, 2, 2), (1, 4, 1)}
    assert {plan.ep for plan, *_ in _divisions(GPT2Config(**SHAPE), 4, 16, cuts_samples=False)} == {1}


@pytest.mark.slow(2)
def test_random_cases_spread_experts_that_can_be():
    cases = [draw_case(1, index, 4) for index in range(250)]
    plans = [(case, case.parallel_plan()) for case in cases]
    spread = [
        (case, plan) for case, plan in plans if plan.ep > 1 and isinstance(MODELS[case.architecture], ExpertsConfig)
    ]
    assert {plan.ep for _, plan in spread} == {2, 3, 4}
    fit = [case for case, plan in spread if case.values["model.num_experts"] % plan.ep == 0]
    assert len(fit) > 10 and len(fit) > 0.8 * len(spread)  # the others are careless


def test_ep_does_not_multiply_the_number_of_processes():
    plan = parse_plan("dp2_ep2_tp2_pp2")
    assert plan.world == 8 and plan.name == "dp2_ep2_tp2_pp2"
    assert parse_plan("ep4").world == parse_plan("cp2_ep4").world == 4
    assert axes_of(parse_plan("dp4_cp2_ep4_zero1").for_world(8), {"ep": 4}) == {
        "replicate": 1, "shard": 2, "ep": 4, "tp": 1,
    }  # fmt: skip
    assert parse_plan("ep2").for_world(6) == ResolvedPlan(dp=6, ep=2)
    assert ResolvedPlan(dp=2, ep=2).for_inference() == ResolvedPlan(dp=2)
    assert notes_on(ResolvedPlan(dp=2, ep=2)) == ["inference ignores expert parallelism of the plan dp2_ep2"]


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ("dp3_ep3", {}, "model.num_experts=8 cannot be divided over ep=3; leave ep out"),
        ("dp4_ep3", {}, "model.num_experts=8 cannot be divided over ep=3; use ep=2 or 4"),
        ("dp2_ep4", {}, "dp x cp = 2 ranks of data cannot be divided over ep=4; use ep=2"),
        ("dp2_ep2", {"model": GPT2Config(**SHAPE)}, "a model of gpt2 has none; leave ep out"),
        ("dp2_ep2", {"graph": "on"}, "graph=on, but under dp2_ep2 the host reads .*; use --graph off"),
        ("dp2_ep2", {"compile": "on"}, "compile=on, but under dp2_ep2 the host reads .*; use --compile off"),
    ],
)
def test_what_cannot_be_is_refused(moe, plan, changes, words):
    with pytest.raises(UserError, match=words):
        replace(moe, plan=plan, global_batch_size=12, **changes).plan_for(parse_plan(plan).world)


def test_a_step_with_ep_is_neither_captured_nor_compiled(moe):
    settings = moe.settings(ResolvedPlan(dp=2, ep=2), torch.device("cuda"), here=False)
    assert not settings.graphs and not settings.compile
