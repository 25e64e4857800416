"""The loss that is told: the mean of an interval."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.records import read_records
from dtgpt.train.interval_loss import IntervalLoss
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import change_state
from tests.support.bodies_train import train_whole_and_in_parts
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(5)

TIMED = ("tokens_per_second", "seconds_per_step", "eta_seconds", "memory_gib", "tokens_per_second_per_device",
         "tflops_per_device")  # fmt: skip


@pytest.fixture
def recipe(recipe):
    recipe = change(recipe, steps=12, micro_batch_size=2, optimizer={"decay_steps": 12}, data={"held_out": 0.0})
    return change(recipe, log={"interval": 5, "sample_tokens": 0}, checkpoint={"keep_last": 0})


def records(run) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in TIMED} for r in read_records(run / "metrics.jsonl")]


def single_steps(recipe) -> dict[int, float]:
    return losses(trained(change(recipe, log={"interval": 1}, name="single")))


def test_a_record_has_the_mean_of_its_interval_and_the_loss_of_its_step(recipe, capsys):
    train(recipe)
    run, out = newest_run(recipe), capsys.readouterr().out
    steps = single_steps(recipe)
    mean = {1: range(1, 2), 5: range(1, 6), 10: range(6, 11), 12: range(11, 13)}
    assert losses(run) == {at: pytest.approx(sum(steps[i] for i in of) / len(of), rel=1e-12) for at, of in mean.items()}
    assert {r["step"]: r["step_loss"] for r in records(run)} == {at: steps[at] for at in mean}
    assert f"step 10/12  loss {losses(run)[10]:.4f}" in out
    assert records(run)[1]["bits_per_byte"] == pytest.approx(losses(run)[5] / math.log(2), rel=1e-3)  # of bytes


@pytest.mark.parametrize(
    "plan, stop",
    [("single", 2), ("dp2", 5), ("pp2", 5)]
    + [pytest.param(plan, 5, marks=pytest.mark.long) for plan in ("tp2", "dp2_zero2", "dp3")],
)
def test_a_resumed_run_has_the_records_of_an_uninterrupted_one_bitwise(recipe, tmp_path, plan, stop):
    """Stopped by a signal within an interval: the first one, or the one after."""
    recipe = change(recipe, plan=plan, global_batch_size=12 if plan == "dp3" else 8, steps=6, log={"interval": 3})
    world, parts = parse_plan(plan).world, change(recipe, runs=str(tmp_path / "parts"))
    codes = pool().run(world, train_whole_and_in_parts, recipe, parts, stop)
    assert codes == [[0, 128 + 15, 0]] * world
    assert records(newest_run(parts)) == records(newest_run(recipe))


def test_a_run_of_fewer_steps_goes_on_with_the_interval_also_under_another_plan(recipe):
    """With the same records but for that of the step that was the last."""
    whole = records(trained(recipe))
    parts, other = trained(recipe, steps=7), trained(recipe, steps=7)
    train(change(recipe, resume=str(parts)))
    assert [r for r in records(parts) if r["step"] != 7] == whole
    assert pool().run(2, train, change(recipe, plan="dp2", resume=str(other))) == [0, 0]
    expected = {r["step"]: pytest.approx(r["loss"], rel=1e-5) for r in whole}
    assert {step: loss for step, loss in losses(other).items() if step != 7} == expected


def test_a_checkpoint_of_an_older_version_begins_an_interval(recipe):
    run = trained(recipe, steps=7)
    folder = run / "checkpoints" / "step_00000007"
    state = json.loads((folder / "state.json").read_text())
    assert state["interval_loss"]["steps"] == 2
    del state["interval_loss"]
    (folder / "state.json").write_text(json.dumps(state))
    change_state(folder, {})
    train(change(recipe, resume=str(run)))
    steps = single_steps(recipe)
    assert losses(run)[10] == pytest.approx(sum(steps[i] for i in (8, 9, 10)) / 3, rel=1e-12)


def test_a_state_whose_interval_is_none_is_refused(recipe, capsys):
    """The run goes on from the checkpoint before it; where there is none, it is refused."""
    run = trained(recipe, steps=2, checkpoint={"interval": 1})
    change_state(run / "checkpoints" / "step_00000002", {"interval_loss": 5})
    train(change(recipe, steps=3, resume=str(run)))
    told = capsys.readouterr().err
    assert "step_00000002/state.json is damaged" in told and "going on from the checkpoint before it" in told
    assert list(losses(run)) == [1, 3]
    change_state(run / "checkpoints" / "step_00000003", {"interval_loss": 5})
    with pytest.raises(UserError, match=r"state\.json is damaged"):
        train(change(recipe, steps=4, resume=str(run / "checkpoints" / "step_00000003")))


def test_a_loss_between_two_records_that_is_no_number_is_noticed(recipe, monkeypatch):
    """Where the steps that are looked at have one."""
    done = Trainer.train_step

    def step(self):
        curve = done(self)
        return curve._replace(loss=curve.loss * math.nan) if self.step == 7 else curve

    monkeypatch.setattr(Trainer, "train_step", step)
    with pytest.raises(UserError, match=r"has diverged: mean loss of 5 steps at step 10 is nan; start again"):
        train(recipe)
    with pytest.raises(UserError, match=r"has diverged: mean loss of 4 steps at step 9 is nan"):
        train(change(recipe, checkpoint={"interval": 9}))


def test_a_step_adds_to_the_sum_where_it_lies():
    """A captured graph, or a copy that is under way, may hold the address; and nothing reads a value."""
    interval = IntervalLoss(Mesh(ResolvedPlan(dp=1), torch.device("cpu")))
    place = interval._sum.data_ptr()
    interval._mesh = SimpleNamespace(sum=None)
    for _ in range(3):
        interval.add(torch.tensor(0.1))
    assert interval._sum.data_ptr() == place and interval.steps == 3
    assert interval._sum.item() == 3 * float(torch.tensor(0.1))
    interval.restart()
    assert interval._sum.data_ptr() == place and interval._sum.item() == 0
