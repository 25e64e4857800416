"""Training in 16 bits: narrow weights beside fp32 masters, gradients summed in fp32, and the loss scale of fp16."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dtgpt.config.recipe import Recipe
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.parallel.gradients import Sums
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_train import skipped_after_each_step, steps_with_an_overflow
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run, rate_of, training
from tests.support.trained import trained

pytestmark = pytest.mark.slow(6)

STEPS = 14
HUGE = {"initial": 2.0**26, "hysteresis": 1, "window": 2}  # some steps are skipped until gradients fit


def steps_of(run) -> list[dict]:
    return [r for r in read_records(run / "metrics.jsonl") if "loss" in r]


@pytest.mark.parametrize("precision, bound", [("bf16", 2e-3), ("fp16", 3e-4)])
def test_a_run_in_16_bits_follows_the_one_in_fp32(recipe, precision, bound):
    recipe = change(recipe, steps=6, loss_scale={"initial": 2.0**12})
    exact = losses(trained(replace(recipe, precision="fp32")))
    found = steps_of(trained(replace(recipe, precision=precision)))
    assert [r["loss"] for r in found] == pytest.approx(list(exact.values()), rel=bound)
    assert [r["loss"] for r in found] != list(exact.values())
    scaling = [(r.get("loss_scale"), r.get("skipped_steps")) for r in found]
    assert scaling == [(2.0**12, 0) if precision == "fp16" else (None, None)] * 6


@pytest.fixture
def huge(recipe):
    return change(recipe, precision="fp16", steps=STEPS, loss_scale=HUGE, optimizer={"decay_steps": STEPS})


def test_a_step_that_overflows_changes_no_weight_and_the_run_learns_in_the_end(huge):
    run, skipped, curve = training(huge), 0, []
    while run.step < STEPS:
        before = [(s.local.clone(), s.parameter.detach().clone()) for s in run.shards]
        loss, norm = run.train_step()
        after = [(s.local, s.parameter.detach()) for s in run.shards]
        same = [all(map(torch.equal, old, new)) for old, new in zip(before, after, strict=True)]
        assert loss.isfinite() and all(same) == (not norm.isfinite()) and any(same) == all(same)
        skipped += all(same)
        curve.append(loss.item())
        assert run.optimizer.metrics()["skipped_steps"] == skipped
        updates = run.step - skipped - (not all(same))  # before this step
        assert run.optimizer.lr.item() == pytest.approx(rate_of(updates, huge), rel=1e-6)
    assert 3 < skipped < STEPS - 3 and run.optimizer.state()["updates"] == STEPS - skipped
    assert curve[-1] < curve[0]


def test_the_records_tell_the_scale_and_the_steps_that_were_skipped(huge):
    records = steps_of(trained(huge))
    counts, scales = [r["skipped_steps"] for r in records], [r["loss_scale"] for r in records]
    assert scales[:3] == [2.0**25, 2.0**24, 2.0**23] and counts[:3] == [1, 2, 3]
    assert [r["grad_norm"] for r in records[:3]] == [None] * 3 and records[-1]["grad_norm"] > 0
    for (before, old), (after, new) in pairwise(zip(counts, scales, strict=True)):
        assert new / old == 0.5 if after > before else new / old in (0.5, 1, 2)  # a taken step may lower it, too
    assert 3 < counts[-1] < STEPS - 3 and any(new == 2 * old for old, new in pairwise(scales))


def test_a_resumed_fp16_run_goes_on_with_its_scale(huge, tmp_path):
    whole = trained(huge)
    halves, step = change(huge, runs=str(tmp_path / "halves")), STEPS - 3
    train(replace(halves, steps=step))
    run = newest_run(halves)
    state = json.loads((run / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
    skipped = state["loss_scale"]["skipped"]
    assert state["updates"] == step - skipped < step and state["loss_scale"]["scale"] < 2.0**24
    train(replace(halves, resume=str(run)))
    told = ("loss", "lr", "loss_scale", "skipped_steps", "grad_norm")
    assert [[r[k] for k in told] for r in steps_of(run)] == [[r[k] for k in told] for r in steps_of(whole)]
    for name in ("weights", "optimizer"):
        file = f"checkpoints/step_{STEPS:08d}/{name}-00000-000.safetensors"
        assert (run / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.parametrize("plan", ["dp2", "dp2_zero3", "tp2_sp", "pp2"])
def test_all_ranks_skip_a_step_in_which_one_overflows(recipe, plan):
    recipe = change(recipe, plan=plan, precision="fp16", micro_batch_size=2, loss_scale={"initial": 2.0**12})
    for scaling, unchanged, updates in pool().run(2, steps_with_an_overflow, recipe):
        assert [s["skipped_steps"] for s in scaling] == [0, 1, 2, 2] and updates == 2
        assert unchanged == [False, True, True, False]


def searching(recipe) -> Recipe:
    """Steps large enough that gradients grow: the scale falls from the first, then falls again."""
    scale = {"initial": 2.0**22, "hysteresis": 1, "window": 2}
    return change(recipe, precision="fp16", global_batch_size=16, optimizer={"lr": 3e-2, "warmup": 0}, loss_scale=scale)


@pytest.fixture(scope="module")
def one_process() -> dict:
    """What one process with one micro-batch does, made once."""
    return {}


@pytest.mark.parametrize(
    "plan, micro_batch_size",
    [("dp", 2), ("dp2_zero3", 4)]
    + [
        pytest.param(plan, size, marks=pytest.mark.long)
        for plan, size in (("dp2", 8), ("dp2_zero1", 4), ("tp2_sp", 4), ("pp2", 4))
    ],
)
def test_every_plan_and_micro_batch_skips_the_same_steps_while_the_scale_searches(
    recipe, one_process, plan, micro_batch_size
):
    recipe, steps = searching(recipe), 12
    if not one_process:
        one_process["skipped"] = skipped_after_each_step(replace(recipe, micro_batch_size=16), steps)
    recipe = replace(recipe, plan=plan, micro_batch_size=micro_batch_size)
    expected = one_process["skipped"]
    assert 3 < expected[-1] < steps - 3
    if plan == "dp":
        assert skipped_after_each_step(recipe, steps) == expected
        return
    assert pool().run(2, skipped_after_each_step, recipe, steps) == [expected] * 2


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_bf16_weights_are_the_rounded_masters_after_every_step(recipe, micro_batch_size):
    """The masters are not bf16 themselves: they move by less than that can tell."""
    run = training(replace(recipe, precision="bf16", micro_batch_size=micro_batch_size))
    for _ in range(2):
        run.train_step()
        for shard in run.shards:
            assert shard.parameter.dtype == torch.bfloat16
            assert torch.equal(shard.parameter, shard.local.bfloat16()), shard.name
        assert not all(torch.equal(shard.local, shard.parameter.float()) for shard in run.shards)


def gradients_by_hand(run: Trainer, count: int) -> list[list[torch.Tensor]]:
    """Of each shard, those of each micro-batch of the first step as backward makes them."""
    windows, ids, key = run.objective.batches.take(0)
    keys = dropout_keys(key, ids, run.settings.model.num_sites)
    parameters, each = [shard.parameter for shard in run.shards], []
    for window, k in zip(windows.chunk(count), keys.chunk(count), strict=True):
        each.append(torch.autograd.grad(run.engine.model(window[:, :-1], k, window[:, 1:]), parameters))
    return [list(parts) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_micro_batches_are_summed_in_fp32(recipe, precision):
    recipe = change(recipe, precision=precision, micro_batch_size=1, loss_scale={"initial": 2.0**12})
    run, differs = training(recipe), False
    by_hand = gradients_by_hand(run, 8)
    run.gradients()
    for shard, parts in zip(run.shards, by_hand, strict=True):
        gradient = run.shards.gradient(shard)
        assert gradient.dtype == torch.float32 and parts[0].dtype == run.settings.dtype
        largest = gradient.abs().max().item()
        torch.testing.assert_close(gradient, sum(part.float() for part in parts), rtol=1e-6, atol=1e-6 * largest)
        narrow = parts[0].clone()
        for part in parts[1:]:
            narrow += part
        differs |= (narrow - gradient).norm() > 1e-4 * gradient.norm()
    assert differs  # sums in 16 bits would have been seen


def test_one_micro_batch_of_one_process_needs_no_second_memory(recipe):
    run = training(replace(recipe, precision="bf16", micro_batch_size=8))
    run.gradients()
    assert type(run.shards.sums) is Sums  # no buckets
    assert all(run.shards.gradient(shard) is shard.parameter.grad for shard in run.shards)


def test_an_overflow_at_the_smallest_scale_ends_the_run_and_one_above_it_does_not(recipe):
    """Halving to the smallest scale is no end: the steps at that scale may go."""
    scale = {"initial": 2.0**40, "minimum": 2.0**39, "hysteresis": 1}
    run = training(change(recipe, precision="fp16", loss_scale=scale))
    norm = run.train_step().norm.item()
    assert not math.isfinite(norm)
    run.optimizer.check(norm)  # which was at 2^40
    norm = run.train_step().norm.item()
    with pytest.raises(UserError, match=r"at the smallest loss scale, 5.49756e\+11; lower loss_scale.minimum or"):
        run.optimizer.check(norm)
