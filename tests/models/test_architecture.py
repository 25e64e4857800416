"""The seam: an architecture in a file of its own goes through every kind of plan, its counts and its memory too."""

import math
from dataclasses import replace

import pytest
import torch

from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.planning.report import describe_plan
from tests.support import bodies_architecture
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool

PLANS = ["tp2_sp", "pp2_zbv", "dp2_tp2_sp_zero2"]  # LLaMA goes through the others: test_llama_parity.py
STEPS = 3


@pytest.fixture
def other(recipe):
    model = OtherConfig(num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)
    return replace(recipe, model=model, micro_batch_size=2, global_batch_size=8, plan="single")


@pytest.fixture(scope="module")
def reference():
    return {}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_follows_one_process(other, reference, plan):
    if not reference:
        losses, weights, _, _ = bodies_architecture.train_other(replace(other, plan="single"), STEPS)
        reference.update(losses=losses, weights=weights)
    world = math.prod(int(part[2:]) for part in plan.split("_") if part[:2] in ("dp", "tp", "pp"))
    results = pool().run(world, bodies_architecture.train_other, replace(other, plan=plan), STEPS)
    losses, weights = results[0][:2]
    assert losses == pytest.approx(reference["losses"], rel=1e-6)
    assert weights.keys() == reference["weights"].keys()
    for name, whole in weights.items():
        torch.testing.assert_close(whole, reference["weights"][name], rtol=1e-4, atol=1e-5)
    for _, _, held, planned in results:
        assert sorted(held) == sorted(planned)


def test_counts_follow_from_the_modules(other):
    with torch.device("meta"):
        parameters = unique_parameters(Decoder(other.model))
    config, sizes = other.model, {name: p.numel() for name, p in parameters.items()}
    assert config.num_parameters == sum(sizes.values()) and config.num_sites == 0
    multiplied = sum(sizes.values()) - sizes["embedding.tokens.weight"]
    assert config.flops_per_token == 6 * multiplied + 12 * 4 * 32 * 16
    settings = replace(other, plan="tp2_pp2").planned(None)
    assert "4 blocks of 32" in describe_plan(settings, "other", [], "H100")
