"""What a trainer takes over from a checkpoint besides weights and moments, what a save must not lose, and what a run
records of its steps."""

import json
import threading
from dataclasses import asdict, replace
from importlib import import_module

import pytest
import torch

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.parallel.shards import SMALL, Shard
from dtgpt.run.records import read_records
from dtgpt.train.checkpoints import state_of
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from tests.support.runs import change, newest_run, rate_of, training

OVERFLOWS = 2.0**24


def resumed(recipe: Recipe, before: Trainer) -> Trainer:
    """A trainer of another recipe that goes on where another one stopped, by way of what `state.json` says."""
    state = json.loads(json.dumps(state_of(before, asdict(replace(recipe, plans={})))))
    after = training(recipe)
    after.restore(state, recipe.batch_sizes(state["step"], state["consumed_samples"]))
    return after


def test_a_resume_with_another_batch_size_follows_the_samples_with_its_learning_rate(recipe):
    """Which is 3e-3 at first and 0 after 80 samples, of which a step takes 8, and then 16."""
    optimizer = {"schedule": "linear", "warmup": 0, "decay_samples": 80}
    recipe = change(recipe, optimizer=optimizer, steps=6)
    run = training(recipe)
    for _ in range(2):
        run.train_step()
    run = resumed(replace(recipe, global_batch_size=16), run)
    rates = []
    while run.step < 6:
        run.train_step()
        rates.append(run.optimizer.lr.item())
    assert rates == pytest.approx([3e-3 * left / 80 for left in (64, 48, 32, 16)], rel=1e-6)


def test_a_step_that_fp16_skipped_before_a_resume_had_the_former_batch_size(recipe):
    """Learning rates follow the samples of steps that were applied: 8 were in the one that was skipped."""
    scale = {"initial": OVERFLOWS, "minimum": OVERFLOWS, "hysteresis": 1}
    optimizer = {"schedule": "linear", "warmup": 0, "decay_samples": 80}
    recipe = change(recipe, precision="fp16", loss_scale=scale, optimizer=optimizer, steps=6)
    run = training(recipe)
    run.train_step()
    assert run.optimizer.state()["updates"] == 0
    run = resumed(replace(recipe, global_batch_size=16), run)
    run.train_step()
    assert run.optimizer.lr.item() == pytest.approx(3e-3)
    run.optimizer.rule.updates += 1
    run.train_step()
    assert run.optimizer.lr.item() == pytest.approx(3e-3 * 72 / 80)


def test_fp16_goes_on_with_its_scale_its_hysteresis_and_its_count_of_skipped_steps(recipe):
    """The first overflow is forgiven, the second one halves the scale: also where a resume lies between them."""
    recipe = change(recipe, precision="fp16", steps=6, loss_scale={"initial": OVERFLOWS, "hysteresis": 2})
    whole, run, told = training(recipe), training(recipe), []
    for step in range(6):
        run = resumed(recipe, run) if step in (1, 3) else run
        assert run.optimizer.gradient_scale == whole.optimizer.gradient_scale, step
        for trainer in (whole, run):
            trainer.train_step()
        assert run.optimizer.state() == whole.optimizer.state(), step
        told.append(run.optimizer.scaler.scale.item())
    assert told[:3] == [OVERFLOWS, OVERFLOWS / 2, OVERFLOWS / 4]


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_loss_scale_changes_no_weight(recipe, clip):
    """A power of two comes off without rounding, before the norm is clipped."""
    weights = []
    for scale in (2.0**8, 2.0**12):
        optimizer = {"clip": clip, "eps": 1e-3}  # which keeps gradients that are rounding from making whole steps
        run = training(change(recipe, precision="fp16", loss_scale={"initial": scale}, optimizer=optimizer))
        for _ in range(2):
            run.train_step()
        weights.append([shard.local.clone() for shard in run.shards])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_next_update_waits_until_a_save_has_its_copies(recipe, tmp_path, monkeypatch):
    run, copied, go_on = training(recipe), [], threading.Event()
    staged = import_module("dtgpt.checkpoint.background.saver").StagedFile
    copy = staged.copy

    def late(self) -> None:
        assert go_on.wait(30)
        copy(self)
        copied.append(self)

    monkeypatch.setattr(staged, "copy", late)
    with Saver(tmp_path, run.shards, run.optimizer.rule) as saver:
        saver.save(0, {"step": 0})
        threading.Timer(0.2, go_on.set).start()
        saver.before_update()
        assert len(copied) == len(saver._files) == 2


@pytest.mark.parametrize(("rows", "replicas"), [(1, 3), (8, 2), (8, 3), (7, 4)])
def test_ranks_that_hold_the_same_region_save_each_row_of_it_once_and_at_its_place(rows, replicas):
    first = range(100, 100 + rows)
    columns = range(SMALL)
    local = torch.arange(rows)[:, None].expand(rows, SMALL)
    saved = []
    for replica in range(replicas):
        shard = Shard(
            index=0, name="a", parameter=None, local=local, low_precision=None, region=(first, columns),
            replicas=replicas, partial=False, is_tied_copy=False, replica=replica,
        )  # fmt: skip
        (part, whole), own = shard.own
        assert whole == columns
        assert [100 + row for row in local[own][:, 0].tolist()] == list(part)
        saved += part
    assert saved == list(first)


def test_records_have_the_loss_the_norm_and_the_learning_rate_of_their_steps(recipe):
    recipe = replace(recipe, steps=4)
    assert train(recipe) == 0
    run, expected = training(recipe), []
    for _ in range(4):
        loss, norm = run.train_step()
        expected.append([loss.item(), norm.item(), rate_of(run.step - 1, recipe)])
    records = [r for r in read_records(newest_run(recipe) / "metrics.jsonl") if "step_loss" in r]
    assert [[r["step_loss"], r["grad_norm"], r["lr"]] for r in records] == [
        pytest.approx(e, rel=1e-6) for e in expected
    ]
