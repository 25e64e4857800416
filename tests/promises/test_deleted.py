"""Capabilities are deleted, folders and lines: the core passes its tests and trains to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.run.sinks import read_records
from tests.support.core import ROOT
from tests.support.deleted import RECORD, copy_tests, delete, run_core_tests

ALL = [name for name, _ in CAPABILITIES]
# The model and the text of recipes/gpt2_tiny.py, whose optimizer is a capability.
TINY = """
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config

def recipe():
    return Recipe(
        name="tiny", model=GPT2Config(num_layers=2, hidden_size=128, num_heads=4, seq_length=64, vocab_size=1024),
        optimizer=OptimizerConfig(lr=1e-3), steps=3, micro_batch_size=4, global_batch_size=8, device="cpu",
        log=LogConfig(interval=1, eval_samples=8, sample_tokens=4),
    )
"""
# Train in a copy of the package without some capabilities, in a child that has torch loaded already.
EACH = """
import os, sys
import torch
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(folder)
        sys.path.insert(0, folder)
        from dtgpt.cli import main
        main(["train", "tiny.py"])
    print("END", os.path.basename(folder), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment_of(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def losses_of(folder: Path, tree: Path) -> list[float]:
    """Train in `folder` by the package in `tree`; return the losses."""
    folder.mkdir()
    (folder / "tiny.py").write_text(TINY)
    command = [sys.executable, "-m", "dtgpt", "train", "tiny.py"]
    subprocess.run(command, cwd=folder, env=environment_of(tree), check=True, capture_output=True, timeout=300)
    (run,) = (folder / "runs").iterdir()
    return [record["loss"] for record in read_records(run / "metrics.jsonl") if "loss" in record]


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    copy_tests(folder, delete(folder, ALL))
    return folder


@pytest.mark.slow(60)
def test_the_core_passes_its_tests_with_every_capability_deleted(core_alone):
    recorded = json.loads(RECORD.read_text())
    ended = run_core_tests(core_alone)
    failed = {name for name, end in ended.items() if end != "PASSED"}
    assert failed <= set(recorded["need a capability"]), "these need a capability that the core does not have"
    passed = len(ended) - len(failed)
    assert passed >= recorded["passed"], f"{passed} tests run with the core alone, where {recorded['passed']} did"


@pytest.mark.slow(8)
def test_the_losses_of_the_core_alone_have_the_bits_of_the_whole(core_alone, tmp_path):
    alone, whole = losses_of(tmp_path / "alone", core_alone), losses_of(tmp_path / "whole", ROOT)
    assert alone == whole
    assert len(alone) == 3


@pytest.mark.long
def test_each_capability_can_be_deleted_alone(tmp_path):
    folders = []
    for capability in ALL:
        folders.append(tmp_path / capability)
        folders[-1].mkdir()
        (folders[-1] / "tiny.py").write_text(TINY)
        delete(folders[-1], without(capability))
    program = [sys.executable, "-c", EACH, *map(str, folders)]
    done = subprocess.run(program, env=environment_of(tmp_path), capture_output=True, text=True, timeout=900)
    ends = [line for line in done.stdout.splitlines() if line.startswith("END")]
    assert ends == [f"END {name} 0" for name in ALL], done.stdout + done.stderr
    for folder in folders:
        assert list(folder.glob("runs/tiny-001/checkpoints/step_00000003/state.json")), folder.name


def without(capability: str) -> list[str]:
    """Return a capability and those that cannot be without it."""
    removed = [capability]
    for name in removed:
        removed += [other for other, needs in CAPABILITIES if name in needs and other not in removed]
    return removed
