"""Capabilities are deleted, folders and lines: the core passes its tests and trains to the same bits."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.run.records import read_records
from tests.support.core import ROOT
from tests.support.deleted import RECORD, delete, run_core_tests
from tests.support.fresh import run_fresh
from tests.support.programs import run_program

ALL = [name for name, _ in CAPABILITIES]
# The model and the text of recipes/gpt2_tiny.py, whose optimizer and tokenizer are capabilities.
TINY = """
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config

def recipe():
    return Recipe(
        name="tiny", model=GPT2Config(num_layers=2, hidden_size=128, num_heads=4, seq_length=64, vocab_size=1024),
        optimizer=OptimizerConfig(lr=1e-3), steps=3, micro_batch_size=4, global_batch_size=8, device="cpu",
        data=DataConfig(tokenizer="bytes"), log=LogConfig(interval=1, eval_samples=8, sample_tokens=4),
    )
"""


def losses_of(folder: Path, start: Callable[..., subprocess.CompletedProcess], tree: Path, *words: str) -> list[float]:
    """Train in `folder` by the package in `tree`, with options; return the losses."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.py").write_text(TINY)
    done = start(["-m", "dtgpt", "train", "tiny.py", *words], folder, {**os.environ, "PYTHONPATH": str(tree)})
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    return [record["loss"] for record in read_records(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.slow(60)
def test_the_core_passes_its_tests_with_every_capability_deleted(core_alone):
    recorded = json.loads(RECORD.read_text())
    ended = run_core_tests(core_alone, *(f"--deselect={name}" for name in recorded["need a capability"]))
    failed = {name for name, end in ended.items() if end != "PASSED"}
    assert not failed, "these need a capability that the core does not have"
    passed = len(ended) - len(failed)
    assert passed >= recorded["passed"], f"{passed} tests run with the core alone, where {recorded['passed']} did"


@pytest.mark.slow(2)
def test_the_losses_of_the_core_alone_have_the_bits_of_the_whole(core_alone, tmp_path):
    alone, whole = (
        losses_of(tmp_path / "alone", run_fresh, core_alone),
        losses_of(tmp_path / "whole", run_program, ROOT),
    )
    assert alone == whole
    assert len(alone) == 3


@pytest.mark.long
@pytest.mark.parametrize("capability", ALL)
def test_each_capability_can_be_deleted_alone(tmp_path, capability):
    delete(tmp_path, without(capability))
    assert len(losses_of(tmp_path, run_fresh, tmp_path)) == 3
    assert list(tmp_path.glob("runs/tiny-001/checkpoints/step_00000003/state.json"))


@pytest.mark.slow(8)
def test_sums_in_pieces_need_neither_experts_nor_plans_nor_documents(tmp_path):
    gone = {name for each in ("dtgpt.models.moe", "dtgpt.data.documents") for name in without(each)}
    assert "dtgpt.planning" in gone and "dtgpt.parallel.exact_tp" not in gone
    delete(tmp_path / "tree", gone)
    words = ["--reduce", "exact_tp", "--plan", "tp2_sp", "--nproc", "2"]
    alone = losses_of(tmp_path / "alone", run_fresh, tmp_path / "tree", *words)
    assert alone == losses_of(tmp_path / "whole", run_program, ROOT, "--reduce", "exact_tp")


def without(capability: str) -> list[str]:
    """Return a capability and those that cannot be without it."""
    removed = [capability]
    for name in removed:
        removed += [other for other, needs in CAPABILITIES if name in needs and other not in removed]
    return removed
