"""Mixtures of experts under every plan that they can have: curves, weights, memory and checkpoints of one process,
equal bits by `--reduce exact`, recomputation, documents; and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import LossScaleConfig, OptimizerConfig
from dtgpt.models.families.olmoe import OLMOE_1B_7B, OlmoeConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.moe import mixture
from dtgpt.models.moe.mixture import routers
from dtgpt.ops.experts.routing import choose
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.parallel.balanced_stages.cut import block_flops
from dtgpt.planning.report import sizes
from dtgpt.util.errors import UserError
from tests.support.bodies_exact import bits_and_choices, bits_of_steps
from tests.support.bodies_optimizer import Part, train_part
from tests.support.ranks import pool
from tests.support.runs import training

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
OLMOE = OlmoeConfig(
    **SHAPE, num_kv_heads=2, head_dim=8, ffn_hidden_size=24, num_experts=6, experts_per_token=2, dropout=0.1
)
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
        key = recipe.model, recipe.optimizer, recipe.global_batch_size, recipe.data
        if key not in made:
            one = replace(recipe, plan="single", recompute="none")
            made[key] = train_part(one, tmp_path_factory.mktemp("one"), STEPS)
        return made[key]

    return of


def run(recipe: Recipe, plan: str, folder, last: int) -> list[Part]:
    return pool().run(parse_plan(plan).world, train_part, replace(recipe, plan=plan), folder, last)


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        ("pp2_interleaved", "dp2_zero3", {}),
        ("dp2_zero1", "pp2_zbv", {}),
        ("pp2_gpipe", "dp2_zero2", {"recompute": "full"}),
        ("dp2", "pp4", {"recompute": "selective"}),
        ("dp2_pp2_zero3", "single", {"optimizer": MuonConfig(lr=5e-3, warmup=2)}),
        ("dp2_pp2_zbv_zero1", "dp3_zero3", {"global_batch_size": 12}),
        ("tp2_sp_pp2", "dp2_zero3", {}),
        ("cp2_tp2_zero1", "tp2_pp2_zbv", {"optimizer": MuonConfig(lr=5e-3, warmup=2)}),
    ],
)
def test_a_run_under_two_plans_follows_one_process(moe, expected, tmp_path, first, then, changes):
    recipe, losses = replace(moe, **changes), []
    whole = expected(recipe)
    for plan, last in ((first, HALF), (then, STEPS)):
        ranks = run(recipe, plan, tmp_path, last)
        losses += ranks[0].losses
        assert all(part.held == part.planned for part in ranks)
    is_muon = "optimizer" in changes
    assert losses == pytest.approx(whole.losses, rel=1e-5 if is_muon else 1e-6)
    assert ranks[0].weights.keys() == whole.weights.keys()
    for name, weight in ranks[0].weights.items():
        torch.testing.assert_close(weight, whole.weights[name], rtol=1e-4, atol=3e-5 if is_muon else 1e-5)


@pytest.mark.slow(5)
def test_documents_are_kept_apart_under_plans(moe, expected, tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": "ab cde f"[: n % 8 + 1] * (n % 3 + 1)}) + "\n" for n in range(600)))
    joined = replace(moe, data=replace(moe.data, path=str(path)))
    data = replace(joined.data, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    recipe = replace(joined, data=data)
    assert expected(recipe).losses != pytest.approx(expected(joined).losses, rel=1e-3)
    for plan in ("dp2_zero3", "pp2_zbv"):
        assert run(recipe, plan, tmp_path / plan, STEPS)[0].losses == pytest.approx(expected(recipe).losses, rel=1e-6)


@pytest.mark.slow(12)
@pytest.mark.parametrize(
    ("plans", "changes"),
    [
        (["dp2", "dp2_pp2_interleaved_zero3"], {}),
        (["dp3_zero3", "dp2_pp2_zero1"], {"precision": "bf16", "steps": 2}),
        (["dp2_zero1", "pp2_gpipe"], {"precision": "fp16", "loss_scale": LossScaleConfig(initial=2.0**10), "steps": 2}),
        (["dp2_zero2"], {"precision": "bf16", "recompute": "full"}),
    ],
)
def test_exact_sums_have_the_same_bits_under_every_plan(moe, plans, changes):
    recipe = replace(
        moe,
        **{"micro_batch_size": 2, "global_batch_size": 12, "reduce": "exact", "precision": "fp32", "steps": 1}
        | changes,
    )
    whole = pool().run(1, bits_of_steps, replace(recipe, plan="single"))[0]
    assert len(set(whole.values())) > 30
    for plan in plans:
        found = pool().run(parse_plan(plan).world, bits_of_steps, replace(recipe, plan=plan))[0]
        assert [name for name in whole if found[name] != whole[name]] == [], plan


@pytest.mark.slow(8)
@pytest.mark.parametrize("steps", [4, pytest.param(100, marks=pytest.mark.long)])
def test_exact_sums_keep_gradients_and_choices_in_16_bits(moe, steps):
    """In every step: a weight that rounds otherwise would turn over a choice sooner or later."""
    balance = BalanceConfig(bias_step=0.01, loss=0.1, z_loss=0.01)
    model = replace(OLMOE, corrects_choice=True)
    recipe = replace(moe, model=model, balance=balance, reduce="exact", precision="bf16", steps=steps)
    whole = pool().run(1, bits_and_choices, replace(recipe, plan="single"))[0]
    assert sum(name.startswith("choices") for name in whole) == steps * OLMOE.num_layers
    for plan in ("dp2", "dp2_zero3", "pp2_1f1b"):
        found = pool().run(2, bits_and_choices, replace(recipe, plan=plan))[0]
        assert found.keys() == whole.keys()
        assert [name for name in whole if found[name] != whole[name]] == [], plan


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputation_chooses_the_same_experts_and_has_the_same_bits(moe, precision, monkeypatch):
    """Each block chooses twice in a step, the second time in backward, in the order of backward."""
    seen: list[torch.Tensor] = []

    def watched(*given):
        seen.append(choose(*given))
        return seen[-1]

    monkeypatch.setattr(mixture, "choose", watched)
    recipe = replace(moe, precision=precision, micro_batch_size=8)
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
    parts = inventory(OLMOE_1B_7B)
    assert OLMOE_1B_7B.num_parameters == 6_919_161_856 and parts.used_parameters == 1_282_017_280
    assert sizes(OLMOE_1B_7B) == "6.92 B parameters, 1.28 B of them for each token"
    table = OLMOE_1B_7B.padded_vocab_size * 2048
    assert OLMOE_1B_7B.flops_per_token(4096) == 6 * (parts.used_parameters - table) + 12 * 16 * 2048 * 4096
    dense = replace(OLMOE, experts_per_token=6)
    assert dense.flops_per_token(16) > OLMOE.flops_per_token(16)
    experts = 6 * OLMOE.num_layers * (4 - 2) * 3 * 24 * 32
    four = replace(OLMOE, experts_per_token=4)
    assert four.flops_per_token(16) - OLMOE.flops_per_token(16) == experts
    blocks = [block_flops(inventory(each), 0, 16) for each in (OLMOE, four)]
    assert blocks[1] - blocks[0] == experts // OLMOE.num_layers


def test_a_model_has_a_router_in_each_block(moe):
    trainer = training(moe)
    assert len(routers(trainer.stages[0])) == OLMOE.num_layers
