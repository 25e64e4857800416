"""Each family with experts under pipelines, dp and ZeRO, and two that have biases or an MLP for all tokens under plans
that cut experts and samples: curves and weights are those of one process."""

from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from tests.support.bodies_optimizer import train_part
from tests.support.families import OURS_WITH_EXPERTS
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(15)

ADAMW = OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4)  # so that gradients of rounding alone make no whole steps
HALF, STEPS = 1, 3
CASES = [(family, "pp2_zbv", "dp2_zero3") for family in sorted(OURS_WITH_EXPERTS.keys() - {"olmoe"})]
CASES += [("qwen2_moe", "tp2_sp_pp2", "cp2_zero3"), ("gpt_oss_moe", "dp2_tp2_zero3", "cp2_tp2")]


@pytest.mark.parametrize(("family", "first", "then"), CASES)
def test_a_run_under_two_plans_follows_one_process(recipe, tmp_path, family, first, then):
    sizes = {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": 8}
    recipe = replace(recipe, model=OURS_WITH_EXPERTS[family], optimizer=ADAMW, **sizes)
    expected, losses = train_part(replace(recipe, plan="single"), tmp_path / "one", STEPS), []
    for plan, last in ((first, HALF), (then, STEPS)):
        ranks = pool().run(parse_plan(plan).world, train_part, replace(recipe, plan=plan), tmp_path / "two", last)
        losses += ranks[0].losses
        assert all(part.held == part.planned for part in ranks)
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert ranks[0].weights.keys() == expected.weights.keys()
    for name, weight in ranks[0].weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=1e-5)
