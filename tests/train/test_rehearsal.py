"""The rehearsal of the first step: what it runs, and that it leaves nothing behind."""

from types import SimpleNamespace

import pytest
import torch

from dtgpt.ops.loss.cross_entropy import to_loss_and_gradient_
from dtgpt.train.rehearsal.observer import Rehearsal, is_rehearsed, of_each_kind, rehearse
from dtgpt.train.setup import open_trainer
from tests.support.runs import change, on_cuda


@pytest.fixture
def trainer(recipe):
    with open_trainer(change(recipe, model={"dropout": 0.1}, device="cpu")) as trainer:
        yield trainer


def test_a_rehearsal_leaves_the_next_steps_as_they_are(recipe, trainer):
    results = [trainer.train_step() for _ in range(2)]
    with open_trainer(change(recipe, model={"dropout": 0.1}, device="cpu")) as other:
        for expected in results:
            rehearse(other)
            found = other.train_step()
            assert [x.item() for x in found] == [x.item() for x in expected]


def test_one_block_of_each_kind_runs(trainer):
    (model,) = trainer.stages
    whole = list(model.blocks)
    assert len(whole) > 1
    with pytest.raises(KeyError), of_each_kind(model):
        assert list(model.blocks) == ["0"]
        raise KeyError
    assert list(model.blocks) == whole


def test_nothing_is_rehearsed_on_a_cpu(trainer):
    assert not is_rehearsed(trainer)
    Rehearsal().prepare(trainer)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        ({"tp": 2}, {}),
        ({"cp": 2}, {}),
        ({"ep": 2}, {}),
        ({"pp": 2}, {}),
        ({"zero": 3}, {}),
        ({}, {"compile": True}),
        ({}, {"products": "fp8"}),
        ({}, {"freezes_weights": True}),
    ],
)
def test_passes_with_messages_or_states_are_not_rehearsed(trainer, monkeypatch, plan, settings):
    monkeypatch.setattr("dtgpt.train.rehearsal.observer.TRITON", True)
    ways = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "zero": 0, **plan}
    given = {"products": None, "freezes_weights": False, "compile": False, "device": torch.device("cuda"), **settings}

    def of(ways, given):
        own = SimpleNamespace(plan=SimpleNamespace(**ways), **given)
        return is_rehearsed(SimpleNamespace(settings=own, objective=trainer.objective))

    assert not of(ways, given)
    assert of(ways | dict.fromkeys(("tp", "cp", "ep", "pp"), 1) | {"zero": 0}, given | dict.fromkeys(settings)) is True


@pytest.mark.cuda
def test_what_is_compiled_side_by_side_is_not_launched(monkeypatch, tmp_path):
    from dtgpt.ops.kernels.side_by_side import compiling

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda", 0)
    logits = torch.randn(16, 24, device=device).bfloat16()
    targets, scale = torch.zeros(16, dtype=torch.int64, device=device), torch.ones((), device=device)
    before = logits.clone()
    with compiling(device):
        to_loss_and_gradient_(logits, targets, scale, 24)
    assert torch.equal(logits, before)
    assert list(tmp_path.rglob("*.cubin"))
    to_loss_and_gradient_(logits, targets, scale, 24)
    assert not torch.equal(logits, before)


@pytest.mark.cuda
def test_a_rehearsed_run_on_a_gpu_has_the_losses_of_one_that_is_not(recipe):
    recipe = change(on_cuda(recipe), model={"dropout": 0.1})
    losses = []
    for rehearsed in (False, True):
        with open_trainer(recipe) as trainer:
            assert is_rehearsed(trainer)
            if rehearsed:
                Rehearsal().prepare(trainer)
            losses.append([trainer.train_step().loss.item() for _ in range(4)])
    assert losses[0] == losses[1]
