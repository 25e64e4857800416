"""What a run sends to Weights & Biases, with a stand-in for its package."""

import sys
from types import SimpleNamespace

import pytest

from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.runs import change, newest_run

pytestmark = pytest.mark.slow(2)


class Service:
    """A package wandb that notes what it is given."""

    errors = SimpleNamespace(Error=ValueError)

    def __init__(self, login: bool = True):
        self.begun, self.records, self.ends, self.known = [], [], [], login

    def login(self, prompt: bool) -> bool:
        return self.known

    def init(self, **options):
        self.begun.append(options)
        log, finish = self.records.append, self.ends.append
        return SimpleNamespace(
            id="abc", log=lambda record, step: log({"step": step, **record}), finish=lambda exit_code: finish(exit_code)
        )


@pytest.fixture
def recipe(recipe):
    return change(recipe, steps=2, log={"wandb": "offline", "interval": 1, "sample_tokens": 0})


def test_records_go_to_wandb_and_a_resume_goes_on_with_its_run(recipe, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    assert train(recipe) == 0
    run = newest_run(recipe)
    (begun,) = service.begun
    assert begun["mode"] == "offline" and begun["name"] == run.name and begun["id"] is None
    assert begun["config"]["log"]["wandb"] == "offline" and (run / "wandb-id").read_text() == "abc"
    assert service.records == read_records(run / "metrics.jsonl") and service.ends == [0]
    assert train(change(recipe, steps=3, resume=str(run))) == 0
    assert service.begun[1]["id"] == "abc" and service.begun[1]["resume"] == "allow"
    assert service.records == read_records(run / "metrics.jsonl")


@pytest.mark.parametrize(
    "package, mode, words", [(None, "offline", "needs the package wandb"), (Service(False), "online", "needs a login")]
)
def test_what_cannot_serve_is_refused_before_a_run_begins(recipe, monkeypatch, tmp_path, package, mode, words):
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(UserError, match=words):
        train(change(recipe, log={"wandb": mode}))
    assert not (tmp_path / "runs").exists()


def test_a_service_that_cannot_start_is_one_sentence(recipe, monkeypatch):
    def refuse(**_):
        raise ValueError("no route")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(errors=Service.errors, init=refuse))
    with pytest.raises(UserError, match=r"wandb cannot start \(no route\)"):
        train(recipe)
