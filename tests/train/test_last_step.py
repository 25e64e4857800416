"""What a run that was killed after its last checkpoint still has to do."""

import os

import numpy as np
import pytest

from dtgpt.config.plan_choice import parse_plan
from dtgpt.data.megatron.indexed import IndexedWriter
from dtgpt.run.records import read_records
from dtgpt.run.report import RunReport
from dtgpt.train.loop import train
from dtgpt.train.observer import HeldOutLoss
from dtgpt.train.texts import generate as samples
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.ranks import pool
from tests.support.runs import change, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(6)

LAST = "samples/step_00000006.txt"


class Killed(BaseException):
    pass


def kill(*_, **__):
    raise Killed


@pytest.fixture
def recipe(recipe, tmp_path):
    """With a part for test, which is looked at once, at the end."""
    with IndexedWriter(tmp_path / "numbers", np.uint16) as writer:
        for i in range(300):
            writer.append(np.array([*(np.arange(10 + i % 37) % 256), 256]))
            writer.end_document()
    data = {"path": str(tmp_path / "numbers"), "tokenizer": "bytes", "split": "90,5,5"}
    return change(recipe, data=data, steps=6, micro_batch_size=2)


def at_the_end(run, step=6) -> list:
    """Of the records of the last step what does not depend on time, then the sample."""
    records = [r for r in read_records(run / "metrics.jsonl") if r["step"] == step and "loss" not in r]
    return [*records, (run / LAST.replace("6", str(step))).read_bytes(), (run / "loss.png").exists()]


@pytest.mark.parametrize(
    "place, name, left, resume",
    [
        (HeldOutLoss, "act", "test loss, sample, loss plot", "auto"),
        (samples, "generate_text", "sample, loss plot", "the run"),
        (RunReport, "finish", "loss plot", "auto"),
    ],
)
def test_what_a_kill_left_is_done(recipe, monkeypatch, capsys, place, name, left, resume):
    whole, method = trained(recipe), getattr(place, name)

    def at_last(self, *arguments):
        return method(self, *arguments) if getattr(self, "part", "") == "valid" else kill()

    monkeypatch.setattr(place, name, at_last)
    with pytest.raises(Killed):
        train(recipe)
    monkeypatch.undo()
    run = newest_run(recipe)
    assert run != whole and not (run / "loss.png").exists()
    again = change(recipe, resume=resume if resume == "auto" else str(run))
    capsys.readouterr()
    assert train(again) == 0
    out = capsys.readouterr().out
    assert f"6 steps are done; left to do: {left}\n" in out and "all is done" in out
    assert at_the_end(run) == at_the_end(whole)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert train(again) == 0
    assert capsys.readouterr().out == f"{run} has done its 6 steps; nothing is left to do\n"
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "plan", ["dp2", *(pytest.param(plan, marks=pytest.mark.long) for plan in ("tp2", "pp2", "dp2_zero3")), "pp2_zbv"]
)
def test_what_is_left_is_done_under_every_plan(recipe, plan):
    recipe = change(recipe, plan=plan, model={"num_layers": 4 if plan == "pp2_zbv" else 2})
    recipe = change(recipe, steps=2, log={"eval_samples": 4})
    world = parse_plan(plan).world
    assert pool().run(world, train, recipe) == [0] * world
    run = newest_run(recipe)
    whole = at_the_end(run, 2)
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "_loss" not in line or "lr" in line]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    for file in (LAST.replace("6", "2"), "loss.png"):
        (run / file).unlink()
    assert pool().run(world, train, change(recipe, resume=str(run))) == [0] * world
    assert at_the_end(run, 2) == whole


@pytest.mark.picture
def test_a_plot_that_is_older_than_the_records_is_drawn_again(recipe, capsys):
    recipe = change(recipe, steps=2)
    train(recipe)
    run = newest_run(recipe)
    os.utime(run / "loss.png", (1, 1))
    capsys.readouterr()
    assert train(change(recipe, resume="auto")) == 0
    assert "left to do: loss plot" in capsys.readouterr().out
    assert train(change(recipe, resume="auto")) == 0
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_signal_while_the_last_is_done_leaves_it_for_the_next_time(recipe, monkeypatch, capsys):
    monkeypatch.setattr(samples, "generate_text", lambda *_: os.kill(os.getpid(), 15))
    assert train(recipe) == 128 + 15
    run = newest_run(recipe)
    assert f"stopped at step 6/6; to go on, add --resume {run}" in capsys.readouterr().out
    monkeypatch.undo()
    assert train(change(recipe, resume=str(run))) == 0
    assert "left to do: sample" in capsys.readouterr().out and (run / LAST).exists()


def test_fewer_steps_than_are_done_are_refused(recipe, capsys):
    run = trained(recipe)
    with pytest.raises(UserError, match=r"already done 6 steps; raise --steps"):
        train(change(recipe, steps=3, resume=str(run)))
    assert train(change(recipe, steps=3, resume="auto")) == 0


def without_times(run) -> list:
    names = ("step", "loss", "grad_norm", "validation_loss", "test_loss")
    kept = [{name: record.get(name) for name in names} for record in read_records(run / "metrics.jsonl")]
    return [*kept, *(path.read_bytes() for path in sorted((run / "samples").iterdir()))]


@pytest.mark.parametrize("place, name", [(Trainer, "held_out"), (samples, "generate_text")])
@pytest.mark.parametrize("end", ["signal", "kill"])
def test_what_is_cut_short_between_two_steps_is_done_by_the_next_start(recipe, monkeypatch, place, name, end):
    log = {"interval": 1, "eval_interval": 2, "sample_interval": 2, "sample_tokens": 8}
    recipe = change(recipe, log=log, checkpoint={"interval": 2, "background": False})
    whole, method = trained(recipe), getattr(place, name)

    def at_step_4(trainer, *arguments):
        if trainer.step == 4:
            kill() if end == "kill" else os.kill(os.getpid(), 15)
        return method(trainer, *arguments)

    monkeypatch.setattr(place, name, at_step_4)
    if end == "kill":
        with pytest.raises(Killed):
            train(recipe)
    else:
        assert train(recipe) == 128 + 15
    monkeypatch.undo()
    run = newest_run(recipe)
    assert without_times(run) != without_times(whole)
    assert train(change(recipe, resume=str(run))) == 0
    assert without_times(run) == without_times(whole)
