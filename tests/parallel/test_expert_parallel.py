"""Expert parallelism: rows go to the ranks of their experts and back, under loads that are as uneven as can be; memory
and messages; and what is refused. `tests/models/moe/test_plans.py` holds its plans against one process."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from dtgpt.compare.fuzz.case import MODELS
from dtgpt.compare.fuzz.drawing import draw_case
from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.inference.open import notes_on
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.layout import axes_of
from dtgpt.planning.activations import block_activations
from dtgpt.planning.report import describe_mesh
from dtgpt.planning.search import _divisions
from dtgpt.planning.traffic import collectives_of, sent_bytes
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process
from tests.models.moe.test_plans import ADAMW, BALANCES, MANY, SHAPE
from tests.models.moe.test_plans import OLMOE as SIX
from tests.support.bodies_balance import balanced_steps, check_same
from tests.support.bodies_dryrun import whole_bytes
from tests.support.bodies_experts import Mixed, Step, exchange, kept_by_a_block, mixed, step_of
from tests.support.bodies_shards import CPU
from tests.support.families import OURS_WITH_EXPERTS
from tests.support.gpus import run_on_two_gpus
from tests.support.one_rank import build_rank, differences
from tests.support.pairwise import each_pair
from tests.support.ranks import pool

OLMOE = replace(SIX, num_experts=8)


@pytest.fixture
def moe(recipe) -> Recipe:
    return replace(recipe, model=OLMOE, optimizer=ADAMW, steps=2, micro_batch_size=2, global_batch_size=8)


@pytest.mark.slow(6)
@pytest.mark.parametrize("asks", [False, True])
def test_where_all_tokens_choose_the_first_experts_the_others_have_no_row_and_a_gradient_of_zero(moe, asks):
    recipe = replace(moe, model=replace(MANY, num_layers=2), global_batch_size=4, micro_batch_size=1)
    whole = step_of(replace(recipe, plan="single"))
    for plan in ("dp2_ep2", "dp4_ep2_zero1"):
        ranks: list[Step] = pool().run(parse_plan(plan).world, step_of, replace(recipe, plan=plan), asks)
        assert [r.loss for r in ranks] == pytest.approx([whole.loss] * len(ranks), rel=1e-6), plan
        assert [r.norm for r in ranks] == pytest.approx([whole.norm] * len(ranks), rel=1e-6), plan
        assert [r.held_out for r in ranks] == pytest.approx([whole.held_out] * len(ranks), rel=1e-6), plan
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(ranks[0].gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
        assert max(rows for r in ranks[1::2] for rows in r.rows) == 0
        assert sum(sum(r.rows) for r in ranks) >= sum(whole.rows)


@pytest.mark.slow(6)
def test_eight_processes_follow_one(moe):
    """Experts over two replicas, each cut over two tp ranks, in two stages: `dp2_ep2_tp2_pp2`."""
    recipe = replace(moe, model=MANY, balance=BALANCES["batch"])
    ranks = pool().run(8, balanced_steps, replace(recipe, plan="dp2_ep2_tp2_pp2"), True)
    check_same(ranks[0], balanced_steps(replace(recipe, plan="single", micro_batch_size=8)))
    assert [rank.held[0] for rank in ranks] == [rank.planned[0] for rank in ranks]


CHOICES = {  # ranks, experts, slots: the experts of each token
    "drawn": (2, 6, 3, lambda tokens: torch.rand(tokens, 6).argsort(1)[:, :3]),
    "first": (2, 4, 2, lambda tokens: torch.arange(2).expand(tokens, 2)),
    "last, backwards": (3, 6, 2, lambda tokens: torch.tensor([5, 4]).expand(tokens, 2)),
    "more slots than a rank has experts": (4, 4, 3, lambda tokens: torch.rand(tokens, 4).argsort(1)[:, :3]),
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("apart", [False, True])
@each_pair(
    name=CHOICES,
    kind=[("olmoe", torch.float32, False), ("olmoe", torch.bfloat16, True), ("gpt_oss_moe", torch.bfloat16, False)],
)
def test_gathered_tokens_have_the_bits_of_one_process(name, kind, apart):
    """Also where memory behind the last row holds anything. fp32 shows the order of sums, which bf16 rounds away. Where
    ranks add a token's rows before its owner does, sums are equal up to rounding, and all else has the same bits."""
    torch.manual_seed(4)
    family, dtype, adapted = kind
    ranks, experts, slots, choose = CHOICES[name]
    config = replace(OURS_WITH_EXPERTS[family], num_experts=experts, experts_per_token=slots)
    choices = choose(ranks * 7).reshape(ranks, 7, slots)
    for found, whole in pool().run(ranks, mixed, config, choices, dtype, apart, "cpu", adapted):
        check_same_but_sums(found, whole, apart)
        for key, gradient in whole.dparameters.items():
            assert torch.equal(found.dparameters[key], gradient), key


def check_same_but_sums(found: Mixed, whole: Mixed, apart: bool) -> None:
    for one, other in zip(found[:3], whole[:3], strict=True):
        if apart or one is found.dweights:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        else:
            close = 2 * torch.finfo(one.dtype).eps
            torch.testing.assert_close(one, other, rtol=close, atol=close * other.abs().max().item())


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_have_the_bits_of_one(tmp_path):
    run_on_two_gpus(tmp_path, "from tests.parallel.test_expert_parallel import check_two_gpus; check_two_gpus()")


def check_two_gpus() -> None:
    """Hold gathered tokens against one GPU: bits, but those of biases, whose sums are products of all rows."""
    process = Process.from_environment()
    start_process_group(torch.device("cuda", process.local_rank), 120.0)
    for family, dtype, apart in product(
        ("olmoe", "gpt_oss_moe"), (torch.bfloat16, torch.float32, torch.float16), (False, True)
    ):
        config = replace(OURS_WITH_EXPERTS[family], num_experts=16, experts_per_token=4, hidden_size=64)
        choices = torch.rand(2, 300, 16, generator=torch.Generator().manual_seed(3)).argsort(2)[..., :4]
        choices[0, :100] = torch.arange(4)
        found, whole = mixed(config, choices, dtype, apart, "cuda")
        check_same_but_sums(found, whole, apart)
        for key, gradient in whole.dparameters.items():
            if key.endswith("bias"):
                torch.testing.assert_close(found.dparameters[key], gradient, rtol=2e-2, atol=1e-1)
            else:
                assert torch.equal(found.dparameters[key], gradient), (family, dtype, apart, key)
    end_process_group()


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


@pytest.mark.slow(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("plan", "shape", "reduce"),
    [("dp2_ep2", {}, "fast"), ("dp4_ep4", {"experts_per_token": 3}, "fast"), ("dp2_ep2", {}, "exact")],
)
def test_tokens_and_rows_have_the_bytes_that_are_planned(moe, plan, shape, reduce, recompute):
    model = replace(OLMOE, num_layers=2, **shape)
    recipe = replace(moe, plan=plan, model=model, reduce=reduce, recompute=recompute)
    named = parse_plan(plan)
    settings = recipe.settings(named.for_world(named.world), CPU)
    planned = {c.kind.replace("-", "_"): c.bytes for c in collectives_of(settings, 0) if c.over == "ep"}
    assert pool().run(named.world, whole_bytes, recipe) == [planned] * named.world


@pytest.mark.slow(2)
@pytest.mark.parametrize("experts", [4, 8])
def test_a_block_keeps_as_many_bytes_more_under_ep_as_are_planned(moe, experts):
    """Those of the rows of another rank. On a CPU attention keeps other tensors, as many in both plans, and experts
    keep the input of their second product, which a GPU computes again."""
    wide = replace(OLMOE, num_layers=1, hidden_size=64, seq_length=128, dropout=0.0)  # else much are indices
    seen, planned = [], []
    for plan in ("dp2", "dp2_ep2"):
        recipe = replace(moe, plan=plan, model=replace(wide, num_experts=experts))
        planned.append(block_activations(recipe.settings(parse_plan(plan).for_world(2), CPU), 0))
        seen.append(pool().run(2, kept_by_a_block, recipe))
    more = [both - one for one, both in zip(*seen, strict=True)]
    again = 2 * wide.seq_length * wide.experts_per_token * wide.ffn_hidden_size * torch.float32.itemsize
    assert more == pytest.approx([planned[1] - planned[0] + again] * 2, rel=1e-4)


def test_messages_of_experts(moe, monkeypatch):
    """Between hosts, rows of even loads: forward there and back, backward the same, of 2 micro-batches in 4 blocks. The
    gradient of experts is summed over the 2 ranks that hold the same ones."""
    monkeypatch.setattr(Plan, "asks_host", True)
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
        ("dp16_ep16", {"graph": "on"}, "graph=on, but under dp16_ep16 the host reads .*; use --graph off"),
        ("dp8_ep8_tp2", {"compile": "on"}, "compile=on, but under dp8_ep8_tp2 the host reads .*; use --compile off"),
    ],
)
def test_what_cannot_be_is_refused(moe, plan, changes, words):
    with pytest.raises(UserError, match=words):
        model = replace(OLMOE, num_experts=16) if parse_plan(plan).world == 16 else OLMOE
        recipe = replace(moe, plan=plan, **{"model": model, "global_batch_size": 96, **changes})
        recipe.plan_for(parse_plan(plan).world)


@pytest.mark.parametrize(
    ("plan", "asks"),
    [
        (ResolvedPlan(dp=2, ep=2), False), (ResolvedPlan(dp=8, ep=8), False), (ResolvedPlan(dp=2, ep=2, tp=4), False),
        (ResolvedPlan(dp=2, ep=2, tp=8), True), (ResolvedPlan(dp=16, ep=16), True), (ResolvedPlan(dp=2, tp=16), False),
    ],
)  # fmt: skip
def test_a_step_is_captured_where_the_ranks_of_experts_are_those_of_a_host(moe, plan, asks):
    settings = replace(moe, global_batch_size=16).settings(plan, torch.device("cuda"), here=False)
    assert plan.asks_host is asks and settings.graphs is not asks
    assert ("even loads" in describe_mesh("x", settings)[1]) is asks
