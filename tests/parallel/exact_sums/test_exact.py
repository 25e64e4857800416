"""`--reduce exact`: the same bits under every plan."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from dtgpt.util.errors import UserError
from tests.support.bodies_exact import (
    bits_of_steps,
    check_fixed_point,
    check_pieces,
    check_squares,
    norms_with_large_gradients,
)
from tests.support.families import OURS
from tests.support.ranks import pool

GPT2 = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, dropout=0.1)
OVERFLOWS = LossScaleConfig(initial=2.0**18, hysteresis=1)  # in the first steps
LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=44, seq_length=16, vocab_size=257
)


@pytest.fixture
def exact(recipe):
    """A recipe of 4 micro-batches, and of one step, after which the held-out loss is that of the new weights."""
    return replace(
        recipe, model=GPT2, micro_batch_size=2, global_batch_size=8, reduce="exact", precision="fp32", steps=1,
        log=replace(recipe.log, eval_samples=4),
    )  # fmt: skip


def bits(recipe, plan: str) -> dict[str, str]:
    return pool().run(parse_plan(plan, {}).world, bits_of_steps, replace(recipe, plan=plan))[0]


BITS = [
    ("single", ["dp2_pp2_interleaved_zero3"], {"model": replace(GPT2, num_layers=4)}),
    ("single", ["dp3_zero3", "dp2_pp2_zero1"], {"precision": "bf16", "global_batch_size": 12}),
    ("single", ["pp4_gpipe"], {"precision": "bf16", "model": replace(LLAMA, num_layers=4)}),
    (
        "single",
        ["dp2_zero1", "dp2_pp2"],
        {"precision": "fp16", "loss_scale": OVERFLOWS, "steps": 2},
    ),
    ("tp2_sp", ["dp2_tp2_sp_zero3"], {"model": replace(GPT2, num_layers=1), "micro_batch_size": 4}),
    ("single", ["dp2_zero1", "dp2_pp2_zero3"], {"optimizer": MuonConfig(lr=6e-3), "model": LLAMA, "steps": 2}),
    ("single", ["dp2_zero3"], {"model": replace(OURS["gpt_oss"], num_layers=2)}),
    ("single", ["pp2"], {"precision": "bf16", "model": replace(OURS["gemma3"], num_layers=3)}),
    ("single", ["dp3_zero3"], {"optimizer": NorMuonConfig(lr=6e-3), "precision": "bf16", "global_batch_size": 6}),
    ("cp2", ["dp2_cp2_zero3"], {}),
    ("cp2", ["dp2_cp2"], {"optimizer": MuonConfig(lr=6e-3), "model": LLAMA, "precision": "bf16"}),
    ("cp4", ["cp4_zero2"], {"model": LLAMA}),  # two ranks have the same heads
    # One micro-batch on each rank, whose sums are rounded as they are made.
    ("single", ["dp2", "dp2_zero3"], {"micro_batch_size": 4}),
    ("single", ["dp3", "dp3_zero2"], {"global_batch_size": 6, "precision": "bf16", "model": LLAMA}),
    ("single", ["dp2_zero3"], {"micro_batch_size": 4, "precision": "fp16", "loss_scale": OVERFLOWS, "steps": 2}),
    ("single", ["pp2_gpipe"], {"micro_batch_size": 8, "precision": "bf16"}),
    ("cp2", ["dp2_cp2"], {"micro_batch_size": 4, "precision": "bf16"}),
]


@pytest.mark.slow(9)
@pytest.mark.parametrize("reference, plans, changes", BITS)
def test_a_plan_has_the_bits_of_another_one(exact, reference, plans, changes):
    recipe = replace(exact, **changes)
    expected = bits(recipe, reference)
    assert len(set(expected.values())) > 30
    for plan in plans:
        found = bits(recipe, plan)
        assert [name for name in expected if found[name] != expected[name]] == [], plan


@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_a_gradient_that_does_not_fit_makes_the_norm_not_a_number_on_all_ranks(exact, micro_batch_size):
    run = functools.partial(pool().run, 2, norms_with_large_gradients)
    for plan in ("dp2", "dp2_zero3"):
        recipe = replace(exact, plan=plan, micro_batch_size=micro_batch_size)
        for fitting, large in run(recipe, (10.0, 1e9)):
            assert math.isfinite(fitting) and math.isnan(large)


@pytest.mark.parametrize("dtype, fraction", [(torch.float32, 49), (torch.bfloat16, 49), (torch.float16, 32)], ids=str)
def test_sums_have_no_order_and_say_what_does_not_fit(dtype, fraction):
    check_fixed_point(dtype, fraction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_what_ranks_sent_are_the_same(dtype):
    check_pieces(dtype)


def test_a_sum_of_squares_does_not_depend_on_its_pieces():
    check_squares()


def test_a_schedule_that_cannot_have_the_same_bits_is_refused(exact):
    with pytest.raises(UserError, match=r"reduce=exact, but the schedule ZBVZeroBubble .* --reduce fast"):
        replace(exact, plan="pp2_zbv", model=replace(GPT2, num_layers=4)).plan_for(2)


def test_attention_whose_gradients_have_no_order_is_refused_on_gpus(exact):
    plan, device = exact.plan_for(1), torch.device("cuda")
    with pytest.raises(UserError, match=r"reduce=exact, but attention=sdpa is sdpa here.*--attention flash"):
        replace(exact, attention="sdpa").settings(plan, device, here=False)
