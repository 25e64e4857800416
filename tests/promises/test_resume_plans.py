"""A run that one plan began goes on under another."""

from dataclasses import replace

import pytest
import torch

import dtgpt
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import CheckpointConfig
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from tests.support.bodies_train import train_until
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(6)


@pytest.fixture
def recipe(recipe):
    shape = {"num_layers": 4, "num_heads": 4}
    return change(recipe, model=shape, micro_batch_size=2, steps=4, log={"eval_interval": 4, "eval_samples": 7})


@pytest.fixture
def whole(recipe):
    """The run folder of one process."""
    return trained(replace(recipe, plan="single"))


def world_of(plan: str) -> int:
    return parse_plan(plan).world


PAIRS = [
    ("dp2_zero3", "tp2_pp2"),
    pytest.param("pp2_zbv", "dp4_zero1", marks=pytest.mark.long),
    ("single", "pp2_zbv"),  # both ends of the model, which share a weight, are on one rank
    ("tp2_sp", "single"),
    pytest.param("dp4", "pp2_interleaved_dp2_zero2", marks=pytest.mark.long),
    pytest.param("dp2_pp2_zbv_zero2", "dp2_pp2_zbv_zero2", marks=pytest.mark.long),
]


@pytest.mark.parametrize("before, after", PAIRS)
def test_a_run_that_was_stopped_under_one_plan_goes_on_under_another(recipe, whole, tmp_path, before, after):
    """A signal to one rank stops all of them, at the same step. Validation loss and sample are those of one process."""
    recipe = replace(recipe, runs=str(tmp_path / "parted"), plan=before)
    world = world_of(before)
    assert pool().run(world, train_until, recipe, 2, world - 1) == [128 + 15] * world
    run = newest_run(recipe)
    assert list(losses(run)) == [1, 2]
    assert pool().run(world_of(after), train, replace(recipe, plan=after, resume=str(run))) == [0] * world_of(after)
    assert list(losses(run)) == [1, 2, 3, 4]
    assert list(losses(run).values()) == pytest.approx(list(losses(whole).values()), rel=1e-5)
    held_out = [
        [r["validation_loss"] for r in read_records(r / "metrics.jsonl") if "validation_loss" in r]
        for r in (run, whole)
    ]
    assert len(held_out[0]) == 1 and held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    samples = [(r / "samples" / "step_00000004.txt").read_bytes() for r in (run, whole)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("plan, world", [("zero3", 1), ("pp2_zero3", 2)])
def test_zero_with_one_replica_is_the_plan_without_it(recipe, whole, tmp_path, capsys, plan, world):
    """And goes on under it, from its own checkpoint."""
    recipe = replace(recipe, runs=str(tmp_path / "zero"), plan=plan, checkpoint=CheckpointConfig(interval=2))
    capsys.readouterr()
    for part in (replace(recipe, steps=2, optimizer=replace(recipe.optimizer, decay_steps=4)), recipe):
        part = replace(part, resume="auto" if part is recipe else None)
        codes = [train(part)] if world == 1 else pool().run(world, train, part)
        assert codes == [0] * world
    assert losses(newest_run(recipe)) == pytest.approx(losses(whole), rel=1e-5)
    if world == 1:
        told = capsys.readouterr()
        assert told.err.count(f"ZeRO-{plan[-1]} shards over replicas, and there is only one") == 2
        assert "plan    single\n" in told.out


@pytest.mark.parametrize("plan", ["zero3", Plan(zero=2)])
def test_a_model_is_loaded_under_zero_on_one_process(whole, capsys, plan):
    tokens = torch.arange(8).view(1, 8)
    logits = dtgpt.load(whole, plan=plan, device="cpu")(tokens)
    assert torch.equal(logits, dtgpt.load(whole, device="cpu")(tokens))
    assert "inference ignores ZeRO" in capsys.readouterr().err
