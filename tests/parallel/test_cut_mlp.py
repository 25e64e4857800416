"""Matrices in fp8 that tensor parallelism cuts send 8 bits, and MLPs of them are fused, with the bits of modules that
quantise what was sent in 16."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from tests.support.bodies_cut_mlp import second_step
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(4)

LAYERS, MICRO_BATCHES = 2, 2
SIZES = {"num_layers": LAYERS, "hidden_size": 64, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
MODELS = {
    "gpt2": GPT2Config(**SIZES, dropout=0.1),
    "four blocks": GPT2Config(**SIZES | {"num_layers": 4}),
    "llama": LlamaConfig(**SIZES, num_kv_heads=4, head_dim=16, ffn_hidden_size=96),
}
BIAS = "mlp.fc.bias"  # whose gradient the fused operation sums in another order


def found_of(recipe, plan: Plan, model: str, by_modules: bool = False, **changes):
    recipe = replace(
        recipe, precision="fp8", steps=2, micro_batch_size=2, model=MODELS[model], plan="under test",
        plans={"under test": plan}, global_batch_size=2 * MICRO_BATCHES * (plan.dp or 1), **changes,
    )  # fmt: skip
    return pool().run(plan.world, second_step, recipe, by_modules)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("plan", ["tp2", "tp2_sp", pytest.param("dp2_tp2_sp_zero3", marks=pytest.mark.long)])
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_a_cut_mlp_is_fused_and_has_the_bits_of_its_modules(recipe, plan, model, recompute):
    plan = parse_plan(plan)
    fused = found_of(recipe, plan, model, recompute=recompute)
    parts = found_of(recipe, plan, model, by_modules=True, recompute=recompute)
    amaxes = [torch.tensor([rank.amaxes for rank in ranks]).amax(0) for ranks in (fused, parts)]
    assert torch.equal(*amaxes) and amaxes[0].min() > 0
    for one, other in zip(fused, parts, strict=True):
        assert one.fused == LAYERS * MICRO_BATCHES * (2 if recompute == "full" else 1) and other.fused == 0
        assert one.loss == other.loss
        assert one.sent == one.planned and (one.sent < 0.7 * other.sent if plan.sequence_parallel else not one.sent)
        assert one.gradients.keys() == other.gradients.keys()
        for name, gradient in one.gradients.items():
            near = 2**-7 * gradient.abs().max().item() if name.endswith(BIAS) else 0
            torch.testing.assert_close(gradient, other.gradients[name], rtol=0, atol=near)


@pytest.mark.parametrize("table", [
    {"blocks.*.mlp.fc": ColwiseParallel()},
    {"blocks.*.mlp.fc": ColwiseParallel(output_layouts=Replicate()), "blocks.*.mlp.proj": None}
])  # fmt: skip
def test_matrices_that_a_plan_of_its_own_cuts_are_not_fused(recipe, table):
    for found in found_of(recipe, Plan(dp=1, tp=2, table=table), "gpt2"):
        assert found.fused == 0


@pytest.mark.long
def test_a_schedule_that_splits_backward_does_not_fuse(recipe):
    for found in found_of(recipe, parse_plan("tp2_sp_pp2_zbv"), "four blocks"):
        assert found.fused == 0
