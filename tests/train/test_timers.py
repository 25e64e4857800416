"""Timers of the parts of a step: they add up, and change no loss."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dtgpt.parallel.engine import Timers
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.timers.parts import PartTimers, timer_line
from tests.support.ranks import each, pool
from tests.support.runs import change, losses, newest_run, on_cuda

pytestmark = pytest.mark.slow(3)

PARTS = ("forward_backward_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "data_seconds")


def test_means_are_of_the_steps_since_the_last_call():
    timers, begin = PartTimers(torch.device("cpu")), time.perf_counter()
    for _ in range(4):
        with timers.measure("forward"):
            time.sleep(0.01)
        timers.next_step()
    assert 0.01 <= timers.take()["forward"] <= (time.perf_counter() - begin) / 4
    assert timers.take() == {}


def test_timers_that_are_off_measure_nothing():
    timers = Timers()
    with timers.measure("forward"):
        pass
    timers.next_step()
    assert not timers.enabled and timers.seconds(None) == {}


class FakeEvent:
    """An event of a device that passes it when it is told to, at the time that it was recorded."""

    passed, clock = 0, 0.0

    def record(self):
        FakeEvent.clock += 1.0
        self.at = FakeEvent.clock

    def query(self):
        return self.at <= FakeEvent.passed

    def synchronize(self):
        FakeEvent.passed = max(FakeEvent.passed, self.at)

    def elapsed_time(self, end):
        assert self.query() and end.query()
        return (end.at - self.at) * 1000


def test_events_of_the_device_are_read_when_it_has_passed_them(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: made.append(FakeEvent()) or made[-1])
    monkeypatch.setattr(FakeEvent, "clock", 0.0)
    monkeypatch.setattr(FakeEvent, "passed", 0)
    timers = PartTimers(torch.device("cuda"))

    def step():
        with timers.measure("all"), timers.measure("one"):
            pass
        timers.next_step()

    step()
    assert len(timers._open) == 2  # nothing waits
    monkeypatch.setattr(FakeEvent, "passed", 100)
    step()
    assert not timers._open
    step()
    assert timers.take() == {"one": 1.0, "all": 3.0}
    assert len(made) == 8  # those that were read are used again


def test_losses_are_the_same_bits_with_and_without_timers(recipe):
    recipe = change(recipe, steps=4, plan="zero2", micro_batch_size=2, log={"interval": 2, "sample_tokens": 0})
    found = {}
    for on in (False, True):
        assert train(change(recipe, log={"timers": on})) == 0
        run = newest_run(recipe)
        found[on] = losses(run)
        reports = [r for r in read_records(run / "metrics.jsonl") if "loss" in r]
        assert all((name in r) == on for r in reports for name in PARTS)
        saves = [r["step"] for r in read_records(run / "metrics.jsonl") if "save_seconds" in r]
        assert saves == [4] * on
    assert found[True] == found[False]
    for record in reports:
        assert 0 < record["forward_seconds"] + record["backward_seconds"] <= record["forward_backward_seconds"]


def test_parts_of_a_step_are_printed(recipe, capsys):
    assert train(change(recipe, steps=1, log={"timers": True, "sample_tokens": 0})) == 0
    shown = capsys.readouterr().out
    assert "  ms/step: forward-backward " in shown and "(forward " in shown and "optimizer " in shown
    assert "step 1: training waited " in shown


def test_replayed_steps_have_no_forward_of_their_own():
    record = {"forward_backward_seconds": 0.0369, "optimizer_seconds": 0.003, "data_seconds": 0.0}
    line = timer_line(record, graphs=True)
    assert line == "  ms/step: forward-backward 36.9 (replayed as CUDA graphs), optimizer 3.0, data 0.0"
    record |= {"forward_seconds": 0.012, "backward_seconds": 0.024}
    line = timer_line(record, graphs=False)
    assert line == "  ms/step: forward-backward 36.9 (forward 12.0, backward 24.0), optimizer 3.0, data 0.0"
    assert timer_line({"loss": 1.0}, graphs=True) == ""


def test_an_engine_with_graphs_does_not_divide_a_replay(recipe):
    with open_trainer(change(recipe, steps=2, log={"timers": True})) as run:
        assert run.engine.timers is run.timers
        graphs = SimpleNamespace(enabled=True)
        again = type(run.engine)(run.engine.model, run.shards, graphs, run.timers)
        assert not again.timers.enabled and run.timers.enabled


@pytest.mark.parametrize("plan", ["pp2", "pp2_zbv"])
def test_stages_of_a_pipeline_measure_their_own_passes(recipe, plan):
    """The slowest rank of each part: of the whole schedule, which waits for neighbours, it takes the most."""
    recipe = change(recipe, steps=2, plan=plan, micro_batch_size=1, model={"num_layers": 4})
    recipe = change(recipe, log={"interval": 1, "sample_tokens": 0})
    cases = [change(recipe, log={"timers": on}) for on in (False, True)]
    assert pool().run(2, each, train, cases) == [[0, 0]] * 2
    without, run = sorted(Path(recipe.runs).iterdir())
    assert losses(run) == losses(without)
    for record in (r for r in read_records(run / "metrics.jsonl") if "loss" in r):
        passes = record["forward_seconds"], record["backward_seconds"]
        assert min(passes) > 0 and max(passes) < record["forward_backward_seconds"]


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_gpu_divides_a_step_unless_it_is_replayed(recipe, graph, capsys):
    recipe = on_cuda(recipe, steps=8, graph=graph, compile="off", log={"interval": 2, "sample_tokens": 0})
    found = {}
    for on in (False, True):
        assert train(change(recipe, log={"timers": on})) == 0
        found[on] = losses(newest_run(recipe))
    assert found[True] == pytest.approx(found[False], rel=1e-4)
    reports = [r for r in read_records(newest_run(recipe) / "metrics.jsonl") if "loss" in r]
    for record in reports:
        assert ("forward_seconds" in record) == ("backward_seconds" in record) == (graph == "off")
        assert 0 < record["optimizer_seconds"] < 60 and 0 < record["forward_backward_seconds"] < 60
    assert ("(replayed as CUDA graphs)" in capsys.readouterr().out) == (graph == "on")
