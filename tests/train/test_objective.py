"""What a run learns, by an objective that stands in one file of the tests, and by those of dtgpt."""

import json
from dataclasses import fields, replace

import pytest
import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.mesh import Mesh
from dtgpt.posttrain.dpo.config import DpoConfig
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.posttrain.totals import IntervalTotals
from dtgpt.run.records import read_records
from dtgpt.train.interval_loss import TOTALS, IntervalLoss
from dtgpt.train.loop import train
from dtgpt.train.objective import LanguageModel, objective_of
from dtgpt.util.errors import UserError
from tests.support.example_objective import SmoothingConfig, SmoothingRecipe, in_use, train_smoothed
from tests.support.ranks import each, pool
from tests.support.runs import change, newest_run

STEPS = 3


@pytest.fixture
def smoothed(recipe):
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    return change(SmoothingRecipe(**values, smoothing=SmoothingConfig(share=0.25)), micro_batch_size=2)


@pytest.mark.slow(2)
def test_an_objective_in_one_file_follows_one_process_under_every_plan(smoothed):
    losses, held_out, totals = train_smoothed(smoothed, STEPS)
    assert losses[-1] < losses[0] and totals[0] == 8 * 16
    plain = train_smoothed(replace(smoothed, smoothing=SmoothingConfig(share=1e-9)), 1)
    assert plain[0][0] != losses[0]
    plans = "dp2", "tp2", "pp2", "cp2"
    for ranks in pool().run(2, each, train_smoothed, [replace(smoothed, plan=plan) for plan in plans], STEPS):
        for plan, found in zip(plans, ranks, strict=True):
            assert found[0] == pytest.approx(losses, abs=2e-6), plan
            assert found[1] == pytest.approx(held_out, abs=2e-6), plan
            assert found[2] == pytest.approx(totals, rel=1e-5), plan


@pytest.mark.slow(2)
def test_a_run_reports_and_saves_what_its_objective_says(smoothed, tmp_path):
    with in_use():
        assert train(change(smoothed, steps=2, log={"eval_interval": 2, "sample_tokens": 0})) == 0
    run = newest_run(smoothed)
    records = [record for record in read_records(run / "metrics.jsonl") if "confidence" in record]
    assert [record["counted_tokens"] for record in records] == [8 * 16] * 2
    assert 0 < records[0]["confidence"] < records[1]["confidence"]
    assert json.loads((run / "checkpoints" / "step_00000002" / "state.json").read_text())["smoothed_steps"] == 2
    assert (run / "answers" / "step_00000002.txt").read_text() == "share: 0.25\n"


def test_a_recipe_turns_on_one_objective(recipe):
    assert objective_of(recipe)[0] is LanguageModel
    both = replace(recipe, dpo=DpoConfig(beta=0.1), grpo=GrpoConfig(group=2))
    with pytest.raises(UserError, match=r"one objective, but dpo\.beta and grpo\.group are given; leave out all but"):
        objective_of(both)


def test_totals_of_another_objective_are_refused():
    mesh = Mesh(ResolvedPlan(dp=1), torch.device("cpu"))
    one = IntervalTotals(mesh, torch.ones(3, dtype=torch.float64))
    one.add(torch.tensor(1.0))
    state = one.state()
    assert state[TOTALS] == [1.0, 1.0, 1.0]
    for interval, own in ((IntervalLoss(mesh), 0), (IntervalTotals(mesh, torch.ones(4, dtype=torch.float64)), 4)):
        with pytest.raises(UserError, match=f"has 3 sums of an interval .* learns has {own}; go on with"):
            interval.restore(state)
