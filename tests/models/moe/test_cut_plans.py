"""Mixtures of experts under plans that cut experts (tp, sp) or samples (cp): losses, loads, figures, norms, gradients
and weights of one process, in all families; what fills samples; 16 and 8 bits; messages; what is refused."""

import json
from dataclasses import replace

import pytest

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import LossScaleConfig, OptimizerConfig
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.util.errors import UserError
from tests.models.moe.test_mixture import MANY
from tests.planning.test_planning import check_messages
from tests.support.bodies_balance import Steps, balanced_steps, check_same
from tests.support.bodies_exact import bits_of_steps
from tests.support.families import OURS_WITH_EXPERTS
from tests.support.ranks import pool

FAMILIES = {**OURS_WITH_EXPERTS, "many": MANY}
BALANCES = {
    "none": BalanceConfig(),
    "batch": BalanceConfig(loss=0.1, z_loss=0.01),
    "sequence": BalanceConfig(loss=0.1, over="sequence"),
}
CASES = [
    ("olmoe", "tp2", "batch", "none"),
    ("olmoe", "dp2_cp2_zero2", "sequence", "full"),
    ("granitemoe", "dp2_tp2_zero1", "sequence", "none"),
    ("granitemoe", "cp2_tp2_sp", "batch", "none"),
    ("gpt_oss_moe", "tp2_pp2_zbv", "none", "none"),
    ("gpt_oss_moe", "cp2_tp2_sp_zero1", "batch", "full"),
    ("glm4_moe", "dp2_tp2_zero3", "batch", "none"),
    ("glm4_moe", "cp2_tp2_sp", "sequence", "selective"),
    ("mixtral", "tp2_sp_pp2_interleaved", "sequence", "none"),
    ("mixtral", "cp2_pp2", "batch", "none"),
    ("qwen2_moe", "tp2_pp2", "batch", "full"),
    ("qwen2_moe", "cp2_tp2_sp_zero3", "none", "none"),
    ("qwen3_moe", "dp2_tp2_sp_zero2", "sequence", "none"),
    ("qwen3_moe", "cp2_zero3", "batch", "none"),
    ("many", "tp2", "none", "full"),
    ("many", "tp2_sp_pp2_zbv", "batch", "none"),
]


@pytest.fixture
def moe(recipe) -> Recipe:
    adamw = OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4)  # gradients of rounding alone make no whole steps
    return replace(recipe, optimizer=adamw, steps=2, micro_batch_size=2, global_batch_size=8)


@pytest.fixture(scope="module")
def expected():
    """Return what gives the steps of one process, each made once."""
    made: dict[object, Steps] = {}

    def of(recipe: Recipe) -> Steps:
        key = recipe.model, recipe.balance, recipe.data
        if key not in made:
            made[key] = balanced_steps(replace(recipe, plan="single", recompute="none"))
        return made[key]

    return of


def of(recipe: Recipe, family: str, balance: str = "none", **changes) -> Recipe:
    model, own = FAMILIES[family], BALANCES[balance]
    own = replace(own, bias_step=0.01) if model.corrects_choice and balance != "none" else own
    return replace(recipe, model=model, balance=own, **changes)


def run(recipe: Recipe, plan: str) -> Steps:
    return pool().run(parse_plan(plan).world, balanced_steps, replace(recipe, plan=plan))[0]


def test_each_family_is_cut_in_each_way():
    for family in FAMILIES:
        words = {word for name, plan, *_ in CASES if name == family for word in plan.split("_")}
        assert {"tp2", "sp"} <= words or {"tp2", "cp2"} <= words, family


@pytest.mark.slow(30)
@pytest.mark.parametrize(("family", "plan", "balance", "recompute"), CASES)
def test_a_cut_mixture_follows_one_process(moe, expected, family, plan, balance, recompute):
    recipe = of(moe, family, balance, recompute=recompute)
    check_same(run(recipe, plan), expected(recipe))


@pytest.mark.slow(6)
@pytest.mark.parametrize(("plan", "balance"), [("cp2", "batch"), ("cp2_tp2_sp", "sequence")])
def test_what_fills_samples_counts_nowhere(moe, expected, tmp_path, plan, balance):
    """A document of which a sample has the end alone has no token with a loss there; others reach over two slices."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": "ab cde fgh"[: n * 7 % 11]}) + "\n" for n in range(600)))
    data = replace(moe.data, path=str(path), reset_attention_mask=True, eod_mask_loss=True)
    recipe = of(moe, "olmoe", balance, data=data)
    whole = expected(recipe)
    assert sum(whole.loads[0][0]) < 8 * 16 * 2
    check_same(run(recipe, plan), whole)


@pytest.mark.slow(10)
@pytest.mark.parametrize(
    ("family", "plan", "changes", "rel"),
    [
        ("many", "tp2_sp", {"precision": "bf16"}, 2e-3),
        ("gpt_oss_moe", "cp2_tp2", {"precision": "bf16"}, 2e-3),
        ("olmoe", "tp2", {"precision": "fp16", "loss_scale": LossScaleConfig(initial=2.0**10)}, 5e-4),
        ("qwen2_moe", "tp2_sp", {"precision": "fp8"}, 2e-3),
        ("qwen2_moe", "dp2_tp2_zero1", {"precision": "fp8"}, 2e-3),
    ],
)
def test_narrow_types_follow_one_process(moe, family, plan, changes, rel):
    recipe = of(moe, family, "batch", **changes)
    found, whole = run(recipe, plan), balanced_steps(replace(recipe, plan="single"))
    assert found.losses == pytest.approx(whole.losses, rel=rel)
    assert found.norms == pytest.approx(whole.norms, rel=20 * rel)


@pytest.mark.slow(8)
@pytest.mark.parametrize(("one", "others"), [("tp2_sp", ["dp2_tp2_sp_zero3", "tp2_sp_pp2"]), ("cp2", ["cp2_zero2"])])
def test_exact_sums_have_the_same_bits_under_plans_of_one_tp_and_cp(moe, one, others):
    recipe = of(moe, "many", "sequence", reduce="exact", steps=1)
    found = [
        pool().run(parse_plan(plan).world, bits_of_steps, replace(recipe, plan=plan))[0] for plan in (one, *others)
    ]
    assert len(set(found[0].values())) > 30
    for other in found[1:]:
        assert [name for name in found[0] if other[name] != found[0][name]] == []


@pytest.mark.slow(6)
def test_the_messages_are_those_that_are_sent(moe):
    cases = [
        ("olmoe", "tp2", "none"), ("many", "tp2_sp", "none"), ("qwen2_moe", "tp2_sp", "full"),
        ("gpt_oss_moe", "tp2", "full"), ("mixtral", "cp2", "none"), ("qwen3_moe", "tp2", "none"),
    ]  # fmt: skip
    check_messages([of(moe, family, plan=plan, recompute=again) for family, plan, again in cases], 2)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("olmoe", {"ffn_hidden_size": 25}, "model.ffn_hidden_size=25 cannot be split over tp=2; use tp=1"),
        ("qwen3_moe", {"expert_size": 25}, "model.expert_size=25 cannot be split over tp=2; use tp=1"),
        ("qwen2_moe", {"shared_size": 41}, "model.shared_size=41 cannot be split over tp=2; use tp=1"),
    ],
)
def test_widths_that_ranks_cannot_share_are_refused(moe, family, changes, words):
    with pytest.raises(UserError, match=words):
        replace(moe, model=replace(FAMILIES[family], **changes), plan="tp2").plan_for(2)
