"""The seam: an optimizer in a file of its own goes through every kind of plan, through checkpoints and `dtgpt plan`."""

from dataclasses import replace

import pytest
import torch

from dtgpt.checkpoint.manifest import Checkpoint, step_folder
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.support.bodies_optimizer import train_part
from tests.support.other_optimizer import MomentumConfig
from tests.support.ranks import pool
from tests.support.runs import newest_run

STEPS = 6
PAIRS = [
    ("dp2", "tp2_pp2"), ("dp2_zero3", "pp2_zbv"), ("tp2_sp", "dp2_zero2"), ("pp2_interleaved", "dp2_tp2_sp_zero1"),
]  # fmt: skip


@pytest.fixture
def other(recipe):
    model = replace(recipe.model, num_layers=4)
    return replace(recipe, model=model, optimizer=MomentumConfig(lr=0.3, warmup=2), steps=STEPS, micro_batch_size=2)


@pytest.fixture(scope="module")
def reference():
    return {}


@pytest.mark.slow(13)
@pytest.mark.parametrize("before, after", PAIRS)
def test_a_run_follows_one_process_also_resumed_under_another_plan(other, reference, tmp_path, before, after):
    if not reference:
        (tmp_path / "whole").mkdir()
        losses, weights, _, _ = train_part(replace(other, plan="single"), tmp_path / "whole", STEPS)
        assert losses[-1] < losses[0] - 0.1
        reference.update(losses=losses, weights=weights)
    found = []
    for plan, last in ((before, 3), (after, STEPS)):
        results = pool().run(parse_plan(plan).world, train_part, replace(other, plan=plan), tmp_path, last)
        assert all(held == planned for _, _, held, planned in results) and sum(held for _, _, held, _ in results)
        found += results[0][0]
    assert found == pytest.approx(reference["losses"], rel=1e-6)
    for name, whole in results[0][1].items():
        torch.testing.assert_close(whole, reference["weights"][name], rtol=1e-4, atol=1e-5)
    checkpoint = Checkpoint(step_folder(tmp_path / "checkpoints", STEPS))
    assert checkpoint.state["optimizer"] == "momentum"
    assert checkpoint.pieces("blocks.0.attn.qkv.weight.momentum")
    assert not checkpoint.pieces("blocks.0.attn.qkv.bias.momentum")


def test_the_run_of_one_optimizer_is_not_resumed_by_another(other, capsys):
    train(replace(other, steps=1))
    run = newest_run(other)
    capsys.readouterr()
    assert override(other, ["--resume", str(run)]).optimizer.momentum == 0.5
    assert capsys.readouterr().err == ""
    adamw = replace(other, optimizer=OptimizerConfig(lr=1e-3))
    sentence = "optimizer.kind=momentum, and the recipe has adamw; .* --init_from "
    with pytest.raises(UserError, match=sentence):
        override(adamw, ["--resume", str(run)])
    with pytest.raises(UserError, match=sentence), open_trainer(adamw, run):
        pass
    assert train(replace(adamw, steps=1, init_from=str(run))) == 0
