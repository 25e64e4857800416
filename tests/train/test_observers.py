"""What happens between steps: an observer that stands in one file, the order, and a run without capabilities."""

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.run.records import read_records
from dtgpt.train.checkpoints import Saving
from dtgpt.train.loop import train
from dtgpt.train.observer import HeldOutLoss, Observer, Turn
from dtgpt.util import seams
from tests.support.example_observer import EVERY
from tests.support.ranks import pool
from tests.support.runs import change, newest_run

MODULES = [module for module, _ in CAPABILITIES]


@pytest.fixture
def use():
    """Return what gives the core these capabilities, for a test."""
    yield seams.use
    seams.use(MODULES)


def train_with_the_example(recipe) -> int:
    seams.use([*MODULES, "tests.support.example_observer"])
    try:
        return train(recipe)
    finally:
        seams.use(MODULES)


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan", ["dp1", "pp2"])
def test_an_observer_of_one_file_acts_between_the_steps_of_all_ranks(recipe, plan):
    world = int(plan[-1])
    recipe = change(recipe, steps=5, plan=plan, log={"interval": 1, "eval_interval": 0, "sample_tokens": 0})
    recipe = change(recipe, model={"num_layers": 2}, micro_batch_size=2)
    assert pool().run(world, train_with_the_example, recipe) == [0] * world
    run = newest_run(recipe)
    recorded = {r["step"]: r["step_loss"] for r in read_records(run / "metrics.jsonl") if "step_loss" in r}
    rows = [line.split(",") for line in (run / "loss.csv").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in rows} == {
        step: loss for step, loss in recorded.items() if step % EVERY == 0
    }


class Told(Observer):
    """Of a capability: between the checkpoint and the test loss."""

    turn, title = Turn.MEASURE, "told"

    def __init__(self, log, steps: int):
        self.steps = steps

    def due(self, step: int) -> bool:
        return step == self.steps


CAPABILITY = seams.Capability(observers=(f"{__name__}:Told",))


@pytest.mark.slow(1)
def test_the_order_after_a_step_is_that_of_the_turns(recipe, use, monkeypatch):
    from dtgpt.train.texts import generate as samples

    order = []
    for place, name in ((HeldOutLoss, "act"), (Saving, "act"), (Told, "act"), (samples, "generate_text")):
        method = getattr(place, name)

        def noted(*arguments, method=method):
            order.append(getattr(arguments[0], "title", "sample") or "checkpoint")
            return method(*arguments)

        monkeypatch.setattr(place, name, noted, raising=False)
    use([*MODULES, __name__])
    assert train(change(recipe, steps=1, log={"sample_tokens": 1})) == 0
    assert order == ["validation loss", "checkpoint", "told", "test loss", "sample"]


@pytest.mark.slow(1)
def test_a_run_without_capabilities_has_no_plot(recipe, use, capsys):
    use(())
    assert train(change(recipe, steps=1, log={"sample_tokens": 0})) == 0
    names = {path.name for path in newest_run(recipe).iterdir()}
    assert "metrics.jsonl" in names and "loss.png" not in names and "no loss.png" not in capsys.readouterr().out
