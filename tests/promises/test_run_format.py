"""A run that was written when checkpoints did not yet name their architecture stays usable.

`fixtures/run_format_1` is a run of 6 steps that ended after 3: the text, the run folder, and what the next steps give.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from dtgpt.checkpoint.load import Saved
from dtgpt.checkpoint.open import open_source
from dtgpt.cli import main
from dtgpt.run.records import read_records
from tests.support.sources import filled

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_format_1"
RECIPE = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"
STEP = "checkpoints/step_00000003"


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A copy of the run, beside its text; its recipe names the text by a relative path."""
    shutil.copytree(FIXTURE, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old" / "run"


def command(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code


def test_weights_are_read(run):
    source = open_source(run)
    assert isinstance(source, Saved) and source.checkpoint.state["step"] == 3
    assert source.config.hidden_size == 12 and source.read("embedding.wte.weight").shape == (128, 12)
    assert "architecture" not in json.loads((run / STEP / "state.json").read_text())
    assert source.checkpoint.state["architecture"] == "gpt2"
    assert all(p.isfinite().all() for p in filled(source).parameters())


def test_a_resume_goes_on_with_its_losses(run):
    """Near those that it would have had then: attention has dropped other elements since."""
    command("train", RECIPE, "--resume", run, "--exit_interval", "0", "--log.interval", "1")
    expected = json.loads((FIXTURE / "losses.json").read_text())
    records = {r["step"]: r for r in read_records(run / "metrics.jsonl") if "loss" in r}
    found = [records[step]["step_loss"] for step in (4, 5, 6)] + [records[4]["loss"]]
    wanted = [*expected["losses"].values(), expected["mean_of_steps_1_to_4"]]
    if (torch.__version__, torch.backends.cpu.get_cpu_capability()) == (expected["torch"], expected["capability"]):
        assert found == wanted
    assert found == pytest.approx(wanted, rel=1e-6)  # other kernels round otherwise
    assert found[:3] == pytest.approx(list(expected["losses_then"].values()), rel=3e-4)


def test_inspect_verifies_it(run, capsys):
    command("inspect", run)
    assert re.search(r"step 3, 12 samples, 192 tokens seen", capsys.readouterr().out)


@pytest.mark.parametrize("target", ["dtgpt", "hf"])
def test_it_is_converted(run, target, tmp_path):
    command("convert", run, tmp_path / "new", "--to", target)
    old, new = open_source(run), open_source(tmp_path / "new")
    for name, value in filled(new).named_parameters():
        rows = old.config.vocab_size if "wte" in name else None
        assert torch.equal(value[:rows], old.read(name)[:rows]), name
