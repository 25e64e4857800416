"""Checkpoints beside captured steps. Run on a GPU."""

import json

import pytest
import torch

from dtgpt.checkpoint.background.saver import BackgroundSaver
from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.train.loop import train
from tests.support.runs import change, losses, newest_run, on_cuda

pytestmark = pytest.mark.cuda
LARGE = {"hidden_size": 1024, "num_layers": 4, "num_heads": 16, "seq_length": 64}  # copies take longer than a step


def digests(recipe, background: bool) -> list[dict]:
    """Of the files of every checkpoint."""
    keep = {"interval": 1, "keep_last": 0, "background": background}
    assert train(change(recipe, checkpoint=keep)) == 0
    folders = list_checkpoints(newest_run(recipe) / "checkpoints")
    return [json.loads((f / "state.json").read_text())["files"] for f in folders]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_save_in_the_background_holds_the_step_at_which_it_began(recipe, precision):
    recipe = on_cuda(recipe, steps=10, model=LARGE, precision=precision)
    behind = digests(recipe, True)
    assert len(behind) == 10 and behind == digests(recipe, False)


def test_copies_lie_in_pinned_memory(recipe, monkeypatch):
    seen, commit = [], BackgroundSaver._commit

    def look(self, *args):
        seen.extend(file.data.is_pinned() for file in self._staged)
        commit(self, *args)

    monkeypatch.setattr(BackgroundSaver, "_commit", look)
    assert train(on_cuda(recipe, steps=4)) == 0
    assert seen and all(seen)


def test_a_resume_on_a_gpu_is_bitwise_under_the_same_plan(recipe):
    """Same key, same batches; nothing here adds up in an order that changes."""
    recipe = on_cuda(recipe, steps=12)
    assert train(recipe) == 0
    whole = losses(newest_run(recipe))
    halves = change(recipe, runs=recipe.runs + "-halves")
    assert train(change(halves, steps=6)) == 0
    assert train(change(halves, resume="auto")) == 0
    assert losses(newest_run(halves)) == whole


def test_memory_that_cannot_be_pinned_makes_a_save_wait(recipe, monkeypatch):
    empty = torch.empty

    def scarce(*args, pin_memory=False, **options):
        if pin_memory and args and isinstance(args[0], int):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, pin_memory=pin_memory, **options)

    recipe = on_cuda(recipe, steps=4)
    monkeypatch.setattr("dtgpt.checkpoint.shard_file.torch.empty", scarce)
    assert train(recipe) == 0
    assert list_checkpoints(newest_run(recipe) / "checkpoints")
