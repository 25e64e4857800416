"""Mixtures of experts under every plan: one table of families, plans, balances, optimizers and recomputation, dropout
on; documents and padding; 16 and 8 bits; equal bits by `--reduce exact`; messages; and what is refused.

Each pair of a family, a balance or an optimizer and a kind of plan is in one case at least. A case begins under one
plan, saves, and goes on under another; losses, norms, loads, figures, gradients, weights and memory are held against
one process.
"""

import json
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.families.olmoe import OLMOE_1B_7B, OlmoeConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.moe import mixture
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.moe.mixture import routers
from dtgpt.models.shared.flops import flops_per_token, used_parameters
from dtgpt.ops.experts.routing import choose
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from dtgpt.parallel.balanced_stages.cut import block_flops
from dtgpt.planning.report import sizes
from dtgpt.util.errors import UserError
from tests.planning.test_planning import check_messages
from tests.support.bodies_balance import Steps, balanced_steps, check_same, joined
from tests.support.bodies_exact import bits_and_choices, bits_of_steps
from tests.support.example_mixture import ManyConfig
from tests.support.families import OURS_WITH_EXPERTS
from tests.support.ranks import pool
from tests.support.runs import training

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
GROUPED = {**SHAPE, "num_kv_heads": 2, "head_dim": 8, "experts_per_token": 2, "dropout": 0.1}
OLMOE = OlmoeConfig(**GROUPED, ffn_hidden_size=24, num_experts=6)
MANY = ManyConfig(**GROUPED, ffn_hidden_size=24, num_experts=8)
FAMILIES: dict[str, ExpertsConfig] = {
    **OURS_WITH_EXPERTS,
    "glm4_moe": replace(OURS_WITH_EXPERTS["glm4_moe"], dense_blocks=1),  # of two blocks one has experts
    "many": MANY,
}
ADAMW = OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4)  # so that gradients of rounding alone make no whole steps
OPTIMIZERS = {
    "adamw": ADAMW,
    "muon": MuonConfig(lr=5e-3, warmup=2),
    "normuon": NorMuonConfig(lr=5e-3, warmup=2),
}
BALANCES = {
    "none": BalanceConfig(),
    "batch": BalanceConfig(loss=0.1, z_loss=0.01),
    "apart": BalanceConfig(loss=0.1, z_loss=0.01, layers="apart"),
    "sequence": BalanceConfig(loss=0.1, over="sequence"),
}
HALF, STEPS = 1, 2
ROWS = 4 * 6000  # bytes of NorMuon's value for each row, of which no plan tells


class Case(NamedTuple):
    family: str
    first: str
    then: str
    balance: str = "none"
    optimizer: str = "adamw"
    recompute: str = "none"

    @property
    def plans(self) -> tuple[Plan, Plan]:
        return parse_plan(self.first), parse_plan(self.then)

    @property
    def kinds(self) -> set[str]:
        """What the two plans do to the model, the batch and the state."""
        found = set()
        for plan in self.plans:
            spreads = plan.ep > 1 and ("ep of all" if plan.ep == (plan.dp or 1) * plan.cp else "ep of some")
            found |= {spreads, "ep"} if spreads else set()
            found |= {"tp"} if plan.tp > 1 and not plan.sequence_parallel else set()
            found |= {"sp"} if plan.sequence_parallel else set()
            found |= {f"zero{plan.zero}"} if plan.zero else set()
            found |= {f"ep zero{plan.zero}"} if spreads and plan.zero else set()
            found |= {plan.schedule} if plan.pp > 1 else set()
            found |= {"cp"} if plan.cp > 1 else set()
        return found


CASES = [
    Case("olmoe", "dp2_ep2", "tp2_sp_pp2_interleaved", "batch", recompute="full"),
    Case("olmoe", "dp4_ep2_zero3", "pp2_zbv", optimizer="muon"),
    Case("olmoe", "pp2_1f1b", "dp4_ep2_zero1", "sequence", "normuon"),
    Case("olmoe", "dp2_pp2_zero3", "cp2_tp2", "apart", "muon"),
    Case("granitemoe", "cp2_ep2_zero3", "tp2_pp2_zbv", "sequence"),
    Case("gpt_oss_moe", "dp2_ep2_pp2_zbv", "cp2_tp2_sp_zero3", "batch", recompute="full"),
    Case("glm4_moe", "cp2_tp2_sp_zero3", "dp2_ep2_pp2_zbv", "sequence", recompute="selective"),
    Case("mixtral", "cp2_ep2_zero3", "tp2_sp_pp2_zbv", "apart"),
    Case("qwen2_moe", "tp2_pp2_zbv", "dp4_ep2_zero2", "batch", recompute="full"),
    Case("qwen2_moe", "dp2_zero1", "cp2_zero3", "batch", "muon"),
    Case("qwen3_moe", "dp2_tp2_sp_zero2", "pp2_gpipe", "sequence"),
    Case("qwen3_moe", "pp2_zbv", "cp2_ep2_zero3", "batch", recompute="selective"),
    Case("many", "dp2_ep2_tp2_sp", "pp2_interleaved", "sequence"),
    Case("many", "cp4_ep2", "dp2_zero3", "batch", "normuon"),
    Case("many", "dp2_zero1", "tp2_sp_pp2_zbv", "sequence", recompute="full"),
    Case("many", "dp2_ep2_pp2_interleaved_zero1", "dp2_ep2_tp2_zero3", "apart"),
]


def test_each_pair_is_in_a_case():
    met = {(value, kind) for case in CASES for value in case[3:] + case[:1] for kind in case.kinds}
    zbv, interleaved, plain = (parse_plan(f"pp2_{name}").schedule for name in ("zbv", "interleaved", "1f1b"))
    cuts = {"tp", "sp", "cp", "ep", "zero1", "zero3"}
    assert not set(product(["batch", "sequence", "full"], {*cuts, zbv, interleaved})) - met
    assert not set(product(["apart"], {*cuts, interleaved})) - met
    assert not set(product(["muon", "normuon"], ["ep of some", "zero1", "zero3", "cp"])) - met
    assert not set(product(FAMILIES, ["ep", "cp", "zero3", zbv])) - met
    assert all(met & {(family, "tp"), (family, "sp")} for family in FAMILIES)
    assert not {"ep of all", "ep zero1", "ep zero2", "ep zero3", plain, "zero2"} - {kind for _, kind in met}


@pytest.fixture
def moe(recipe) -> Recipe:
    return replace(recipe, optimizer=ADAMW, model=OLMOE, steps=STEPS, micro_batch_size=2, global_batch_size=4)


def of(recipe: Recipe, family: str, *plans: str, balance: str = "none", **changes) -> Recipe:
    """Return a recipe of as many layers as the plans need, whose batch each of them cuts into two micro-batches."""
    made, model, own = [parse_plan(plan) for plan in plans], FAMILIES[family], BALANCES[balance]
    own = replace(own, bias_step=0.01) if model.corrects_choice and balance != "none" else own
    model = replace(model, num_layers=max(2, *(plan.num_stages for plan in made), 0))
    batch = 4 * max(plan.dp or 1 for plan in made)
    return replace(recipe, **{"model": model, "balance": own, "global_batch_size": batch, **changes})


@pytest.fixture(scope="module")
def expected():
    """Return what gives the steps of one process, each made once."""
    made: dict[object, Steps] = {}

    def steps(recipe: Recipe) -> Steps:
        key = recipe.model, recipe.balance, recipe.data, recipe.optimizer, recipe.global_batch_size, recipe.steps
        if key not in made:
            made[key] = balanced_steps(replace(recipe, plan="single", recompute="none", micro_batch_size=4))
        return made[key]

    return steps


def run(recipe: Recipe, plan: str, *given) -> list[Steps]:
    made = parse_plan(plan)
    size = recipe.global_batch_size // (2 * (made.dp or 1))
    return pool().run(made.world, balanced_steps, replace(recipe, plan=plan, micro_batch_size=size), *given)


@pytest.mark.slow(36)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_under_two_plans_follows_one_process(moe, expected, tmp_path, case):
    optimizer = OPTIMIZERS[case.optimizer]
    recipe = of(moe, case.family, case.first, case.then, balance=case.balance, optimizer=optimizer)
    whole, parts = expected(recipe), []
    recipe = replace(recipe, recompute=case.recompute)
    for plan, last in ((case.first, HALF), (case.then, STEPS)):
        ranks = run(recipe, plan, False, tmp_path, last)
        parts.append(ranks[0])
        for part in ranks:
            assert part.held[0] == part.planned[0]
            assert part.planned[1] <= part.held[1] <= part.planned[1] + ROWS * (case.optimizer == "normuon")
    check_same(joined(*parts), whole)


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    ("plan", "balance"),
    [
        ("dp2_zero3", "sequence"),
        ("pp2_zbv", "batch"),
        ("cp2", "batch"),
        ("cp2_tp2_sp", "sequence"),
        ("dp2_ep2", "none"),
    ],
)
def test_documents_are_kept_apart_and_what_fills_samples_counts_nowhere(moe, expected, tmp_path, plan, balance):
    """A document of which a sample has the end alone has no token with a loss there; others reach over two slices."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": "ab cde fgh"[: n * 7 % 11]}) + "\n" for n in range(600)))
    masks = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    data = replace(moe.data, path=str(path), **masks)
    recipe = of(moe, "olmoe", plan, balance=balance, data=data, steps=1)
    whole = expected(recipe)
    with pytest.raises(AssertionError):  # the text shows whether documents are kept apart
        check_same(expected(replace(recipe, data=replace(data, reset_attention_mask=False))), whole)
    assert balance == "none" or sum(whole.loads[0][0]) < recipe.global_batch_size * 16 * 2
    check_same(run(recipe, plan)[0], whole)


@pytest.mark.slow(12)
@pytest.mark.parametrize(
    ("family", "plan", "changes", "rel"),
    [
        ("many", "tp2_sp", {"precision": "bf16"}, 2e-3),
        ("many", "dp2_zero3", {"precision": "bf16"}, 2e-3),
        ("gpt_oss_moe", "cp2_tp2", {"precision": "bf16"}, 2e-3),
        ("olmoe", "tp2", {"precision": "fp16", "loss_scale": LossScaleConfig(initial=2.0**10)}, 5e-4),
        ("qwen2_moe", "dp2_tp2_sp_zero1", {"precision": "fp8"}, 2e-3),
    ],
)
def test_narrow_types_follow_one_process(moe, family, plan, changes, rel):
    recipe = of(moe, family, plan, balance="batch", **changes)
    found, whole = run(recipe, plan)[0], balanced_steps(replace(recipe, plan="single"))
    assert found.losses == pytest.approx(whole.losses, rel=rel)
    assert found.norms == pytest.approx(whole.norms, rel=20 * rel)


EXACT = [  # the first plan holds for the others where tp and cp are the same
    (["single", "dp2", "dp2_ep2_pp2_interleaved_zero3"], {"steps": 1}),
    (["single", "dp3_ep3_zero3", "dp2_ep2_pp2_zero1"], {"precision": "bf16", "global_batch_size": 12}),
    (
        ["single", "dp4_ep2_zero2"],
        {"precision": "bf16", "global_batch_size": 12, "micro_batch_size": 3, "model": MANY, "steps": 1},
    ),
    (["single", "dp2_ep2_zero2"], {"precision": "bf16", "recompute": "full", "steps": 1}),
    (
        ["single", "dp2_zero1", "pp2_gpipe"],
        {"precision": "fp16", "loss_scale": LossScaleConfig(initial=2.0**10)},
    ),
    (["tp2_sp", "dp2_tp2_sp_zero3", "tp2_sp_pp2"], {"model": MANY, "steps": 1}),
    (["cp2", "cp2_zero2"], {"model": MANY, "steps": 1, "global_batch_size": 4}),
]


@pytest.mark.slow(16)
@pytest.mark.parametrize(("plans", "changes"), EXACT)
def test_exact_sums_have_the_same_bits_under_every_plan(moe, plans, changes):
    """Also of a single micro-batch, whose sums other parameters round as they are made."""
    given = {"global_batch_size": 8, "reduce": "exact", "balance": BALANCES["batch"], **changes}
    recipe = replace(moe, **given)
    layers = max(2, *(parse_plan(plan).num_stages for plan in plans))
    recipe = replace(recipe, model=replace(recipe.model, num_layers=layers))
    whole, *others = (pool().run(parse_plan(p).world, bits_of_steps, replace(recipe, plan=p))[0] for p in plans)
    assert len(set(whole.values())) > 30
    for plan, found in zip(plans[1:], others, strict=True):
        assert [name for name in whole if found[name] != whole[name]] == [], plan


@pytest.mark.slow(3)
@pytest.mark.parametrize("steps", [4, pytest.param(100, marks=pytest.mark.long)])
def test_exact_sums_keep_gradients_and_choices_in_16_bits(moe, steps):
    """In every step: a weight that rounds otherwise would turn over a choice sooner or later."""
    balance = BalanceConfig(bias_step=0.01, loss=0.1, z_loss=0.01)
    model = replace(OLMOE, num_layers=2, corrects_choice=True)
    recipe = replace(moe, model=model, balance=balance, reduce="exact", precision="bf16", steps=steps)
    whole = pool().run(1, bits_and_choices, replace(recipe, plan="single"))[0]
    assert sum(name.startswith("choices") for name in whole) == steps * model.num_layers
    for plan in ("dp2", "dp2_zero3", "pp2_1f1b"):
        found = pool().run(2, bits_and_choices, replace(recipe, plan=plan))[0]
        assert found.keys() == whole.keys()
        assert [name for name in whole if found[name] != whole[name]] == [], plan


@pytest.mark.slow(4)
def test_the_messages_are_those_that_are_sent(moe):
    cases = [
        ("olmoe", "tp2", "none"), ("many", "tp2_sp", "none"), ("qwen2_moe", "tp2_sp", "full"),
        ("gpt_oss_moe", "tp2", "full"), ("mixtral", "cp2", "none"), ("qwen3_moe", "tp2", "none"),
        ("olmoe", "dp2_ep2", "none"), ("mixtral", "cp2_ep2", "full"),
    ]  # fmt: skip
    check_messages([of(moe, family, plan, plan=plan, recompute=again) for family, plan, again in cases], 2)


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputation_chooses_the_same_experts_and_has_the_same_bits(moe, precision, monkeypatch):
    """Each block chooses twice in a step, the second time in backward, in the order of backward."""
    seen: list[torch.Tensor] = []

    def watched(*given):
        seen.append(choose(*given))
        return seen[-1]

    monkeypatch.setattr(mixture, "choose", watched)
    recipe = replace(moe, precision=precision, micro_batch_size=4)
    found = {}
    for recompute in ("none", "full"):
        seen.clear()
        trainer = training(replace(recipe, recompute=recompute))
        trainer.gradients()
        found[recompute] = [trainer.gradient(shard).clone() for shard in trainer.shards]
        assert len(seen) == OLMOE.num_layers * (1 if recompute == "none" else 2)
    assert all(map(torch.equal, seen[:4], reversed(seen[4:])))
    assert all(map(torch.equal, found["none"], found["full"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts_per_token": 7}, "model.experts_per_token=7 is more than model.num_experts=6"),
        ({"num_experts": 0}, "model.num_experts=0"),
        ({"experts_per_token": 0}, "model.experts_per_token=0"),
        ({"clip_qkv": -1.0}, "model.clip_qkv=-1.0"),
    ],
)
def test_shapes_that_no_model_has_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        replace(OLMOE, **changes).validate()


def test_flops_count_the_experts_of_a_token():
    assert OLMOE_1B_7B.num_parameters == 6_919_161_856 and used_parameters(OLMOE_1B_7B) == 1_282_017_280
    assert sizes(OLMOE_1B_7B) == "6.92 B parameters, 1.28 B of them for each token"
    table = OLMOE_1B_7B.padded_vocab_size * 2048
    assert flops_per_token(OLMOE_1B_7B, 4096) == 6 * (used_parameters(OLMOE_1B_7B) - table) + 12 * 16 * 2048 * 4096
    dense = replace(OLMOE, experts_per_token=6)
    assert flops_per_token(dense, 16) > flops_per_token(OLMOE, 16)
    experts = 6 * OLMOE.num_layers * (4 - 2) * 3 * 24 * 32
    four = replace(OLMOE, experts_per_token=4)
    assert flops_per_token(four, 16) - flops_per_token(OLMOE, 16) == experts
    blocks = [block_flops(inventory(each), 0, 16) for each in (OLMOE, four)]
    assert blocks[1] - blocks[0] == experts // OLMOE.num_layers


def test_a_model_has_a_router_in_each_block(moe):
    trainer = training(moe)
    assert len(routers(trainer.stages[0])) == OLMOE.num_layers
