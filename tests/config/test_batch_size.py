"""The batch ramps up as Megatron-LM's does, and every plan follows the same ramp."""

import json
import re
from dataclasses import replace

import pytest

from dtgpt.compare.compare import compare
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(3)

RAMP = "4 4 40"


@pytest.fixture
def recipe(recipe):
    """4 samples a step up to 13 samples, 8 up to 26, 12 up to 40, then 16."""
    recipe = change(recipe, micro_batch_size=2, global_batch_size=16, rampup_batch_size=RAMP, steps=8)
    return change(recipe, log={"eval_interval": 8, "sample_tokens": 0})


def naive(consumed: int, start: int, increment: int, samples: int, whole: int) -> int:
    """By megatron/microbatches.py of July 2023."""
    if consumed > samples:
        return whole
    per_increment = samples / ((whole - start) / increment)
    return start + int(consumed / per_increment) * increment


@pytest.mark.parametrize("ramp, whole", [((4, 4, 40), 16), ((32, 32, 65536), 512), ((1, 1, 7), 3), ((16, 16, 1), 64)])
def test_sizes_are_megatrons(recipe, ramp, whole):
    recipe = replace(recipe, global_batch_size=whole, micro_batch_size=1, rampup_batch_size=" ".join(map(str, ramp)))
    sizes, consumed = recipe.batch_sizes(), 0
    for step in range(600):
        expected = naive(consumed, *ramp, whole)
        assert sizes.after(consumed) == expected == sizes.at(step) and sizes.before(step) == consumed
        consumed += expected


def test_a_resumed_run_has_the_sizes_of_an_uninterrupted_one(recipe):
    whole = recipe.batch_sizes()
    for first in range(12):
        resumed = recipe.batch_sizes(first, whole.before(first))
        assert [(resumed.at(s), resumed.before(s)) for s in range(20)] == [
            (whole.at(s), whole.before(s)) for s in range(20)
        ]


@pytest.mark.parametrize("seen", [4, 5])  # as many samples as the ramp has by then, or another number
def test_a_schedule_of_samples_goes_on_amid_the_ramp(recipe, seen):
    """Without a warmup there is no rate for a step that would begin after fewer than 0 samples."""
    recipe = change(recipe, steps=None, train_samples=16, rampup_batch_size="4 12 4", optimizer={"warmup": 0})
    rates = recipe.schedule.rates(2, recipe.batch_sizes(1, seen))
    assert rates[0] == recipe.optimizer.lr and len(rates) == 2


@pytest.mark.parametrize(
    "plan", ["pp2_gpipe", *(pytest.param(plan, marks=pytest.mark.long) for plan in ("dp2", "dp2_zero2", "tp2", "pp2"))]
)
def test_every_plan_follows_the_ramp_of_one_process(recipe, plan):
    recipe = replace(recipe, micro_batch_size=1)
    whole = losses(trained(recipe, plan="single"))
    parted = replace(recipe, plan=plan, runs=f"{recipe.runs}-{plan}")
    assert pool().run(2, train, parted) == [0, 0]
    assert losses(newest_run(parted)) == pytest.approx(whole, rel=1e-5)


def test_progress_tells_the_batch_while_it_grows(recipe, capsys):
    train(change(recipe, log={"interval": 1}))
    told = [r["batch_size"] for r in read_records(newest_run(recipe) / "metrics.jsonl") if "loss" in r]
    assert told == [4, 4, 4, 4, 8, 8, 12, 16]
    assert "step 5/8  batch 8  loss" in capsys.readouterr().out
    plain = change(recipe, rampup_batch_size=None, steps=1)
    train(plain)
    assert "  batch " not in capsys.readouterr().out
    assert [r["batch_size"] for r in read_records(newest_run(plain) / "metrics.jsonl") if "loss" in r] == [16]


def test_the_micro_batch_does_not_matter(recipe):
    assert losses(trained(recipe, micro_batch_size=4)) == pytest.approx(losses(trained(recipe)), rel=1e-5)


def test_a_run_resumed_amid_the_ramp_is_the_same_bitwise(recipe, tmp_path):
    whole = trained(recipe)
    halves = replace(recipe, runs=str(tmp_path / "halves"))
    train(change(halves, steps=3, optimizer={"decay_steps": 8}))
    train(replace(halves, resume="auto"))
    assert losses(newest_run(halves)) == losses(whole)
    state = json.loads((whole / "checkpoints" / "step_00000008" / "state.json").read_text())
    assert state["consumed_samples"] == recipe.batch_sizes().before(8) == 4 * 4 + 8 * 2 + 12 + 16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rampup_batch_size": "4 4"}, ["START INCREMENT SAMPLES"]),
        ({"rampup_batch_size": "4 5 40"}, ["does not lead to global_batch_size=16"]),
        ({"rampup_batch_size": "16 4 40"}, ["does not lead to global_batch_size=16"]),
        ({"rampup_batch_size": "3 1 40"}, ["passes 3 samples a step", "micro_batch_size=2", "for START and INCREMENT"]),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(recipe, changes, words):
    with pytest.raises(UserError) as error:
        train(change(recipe, **changes))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "ramp, world, plan, micro, remedies",
    [
        ("3 1 40", 1, "single", 2, {"micro_batch_size": 1, "rampup_batch_size": "2 2 40"}),
        ("2 2 40", 2, "dp2", 2, {"micro_batch_size": 1, "rampup_batch_size": "4 4 40"}),
        ("4 4 40", 4, "dp2_pp2", 2, {"micro_batch_size": 1, "rampup_batch_size": "8 8 40"}),
        ("3 1 40", 8, "dp8", 2, {"rampup_batch_size": None}),
    ],
)
def test_remedies_of_a_ramp_that_a_plan_cannot_split_work(recipe, ramp, world, plan, micro, remedies):
    recipe = change(recipe, plan=plan, rampup_batch_size=ramp, micro_batch_size=micro)
    recipe.validate()
    with pytest.raises(UserError, match=r"passes \d samples a step") as error:
        recipe.plan_for(world)
    multiple = int(re.search(r"use multiples of (\d+) for START and INCREMENT", str(error.value))[1])
    assert all(int(n) % multiple == 0 for n in (remedies["rampup_batch_size"] or "").split()[:2])
    for name, value in remedies.items():
        change(recipe, **{name: value}).plan_for(world)


def test_plan_and_compare_refuse_a_ramp_before_they_begin(recipe, monkeypatch):
    recipe = change(recipe, rampup_batch_size="2 2 40")
    monkeypatch.setattr("dtgpt.compare.compare.run_plan", None)
    with pytest.raises(UserError, match="passes 2 samples a step"):
        replace(recipe, plan="dp2").planned(2)
    with pytest.raises(UserError, match="plan dp2: rampup_batch_size='2 2 40' passes 2 samples"):
        compare(recipe, None, ["dp2"], 2, None, [])
