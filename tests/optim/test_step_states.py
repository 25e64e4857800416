"""What a step keeps for the next one: a state that stands in one file, and what is asked of a checkpoint's entries."""

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.checkpoint.manifest import Checkpoint, list_checkpoints
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util import seams
from tests.support.bodies_checkpoint import change_state
from tests.support.example_state import KEPT, MeanLoss
from tests.support.runs import change, losses, newest_run, training


@pytest.fixture
def example():
    modules = [module for module, _ in CAPABILITIES]
    seams.use([*modules, "tests.support.example_state"])
    yield
    seams.use(modules)


@pytest.mark.slow(4)
def test_a_state_of_one_file_is_recorded_and_goes_on_after_a_resume(recipe, example, tmp_path):
    recipe = change(recipe, steps=4, log={"eval_interval": 0, "sample_tokens": 0}, checkpoint={"keep_last": 0})
    train(recipe)
    each, mean, means = losses(newest_run(recipe)), 0.0, {}
    for step, loss in each.items():
        mean = means[step] = KEPT * mean + (1 - KEPT) * loss if mean else loss
    told = {r["step"]: r["mean_loss"] for r in read_records(newest_run(recipe) / "metrics.jsonl") if "mean_loss" in r}
    assert told == pytest.approx(means, rel=1e-6)
    halves = change(recipe, runs=str(tmp_path / "halves"))
    train(change(halves, exit_interval=2))
    train(change(halves, resume="auto"))
    records = read_records(newest_run(halves) / "metrics.jsonl")
    assert {r["step"]: r["mean_loss"] for r in records if "mean_loss" in r} == told
    folder = list_checkpoints(newest_run(halves) / "checkpoints")[-1]
    assert Checkpoint(folder).state["mean_loss"] == told[4]
    change_state(folder, {"mean_loss": "high"})
    with pytest.raises(Damaged, match="mean_loss must be a finite number"):
        Checkpoint(folder)


def test_a_state_may_skip_a_step(recipe, example):
    run = training(recipe)
    mean = next(state for state in run.optimizer.states if isinstance(state, MeanLoss))
    run.train_step()
    mean.value.fill_(0.1)
    before = [shard.local.clone() for shard in run.shards]
    run.train_step()
    assert all(shard.local.equal(old) for shard, old in zip(run.shards, before, strict=True))
    assert run.optimizer.state()["updates"] == 1 and mean.state() == pytest.approx(0.1)


def test_a_run_has_the_states_that_it_asks_for(recipe):
    def names(**changes) -> list[str]:
        return [state.name for state in training(change(recipe, **changes)).optimizer.states]

    assert names() == ["empty_steps"]
    assert names(precision="fp16", optimizer={"skip_loss_z": 3.0}) == ["outliers", "loss_scale", "empty_steps"]
    assert names(precision="fp8", log={"show": "loss,z"}) == ["fp8_exponents", "outliers", "empty_steps"]


@pytest.mark.slow(2)
@pytest.mark.parametrize("entry", [{"fp8_exponents": "x"}, {"outliers": {}}, {"loss_scale": 2}, {"empty_steps": -1}])
def test_an_entry_is_checked_also_where_no_run_takes_it(recipe, entry):
    train(change(recipe, steps=1, log={"eval_interval": 0, "sample_tokens": 0}))
    (folder,) = list_checkpoints(newest_run(recipe) / "checkpoints")
    change_state(folder, entry)
    with pytest.raises(Damaged):
        Checkpoint(folder)
