"""The Hugging Face folder that a run leaves."""

import json
import os
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

import dtgpt
from dtgpt.interop import convert
from dtgpt.models.families.track3 import Track3Config
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.loop import train
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.support.disks import train_with_files_of_at_most
from tests.support.ranks import pool
from tests.support.runs import change

pytestmark = pytest.mark.slow(8)
TOKENS = (torch.arange(24) * 10).view(2, 12)


@pytest.fixture
def exporting(recipe):
    return change(recipe, steps=2, log={"sample_tokens": 0, "eval_interval": 0}, export={"hf": "last"})


def assert_is_the_model(run: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
    with torch.no_grad():
        found = theirs(TOKENS).logits
    torch.testing.assert_close(dtgpt.load(run, device="cpu")(TOKENS), found, rtol=1e-4, atol=1e-5)
    text = "a text"
    assert transformers.AutoTokenizer.from_pretrained(run / "hf").encode(text) == list(text.encode())


def test_a_run_leaves_the_folder_of_its_last_step(exporting, monkeypatch, capsys):
    assert train(override(change(exporting, export={"hf": "off"}), ["--checkpoint.hf", "last"])) == 0
    (run,) = Path(exporting.runs).iterdir()
    assert_is_the_model(run)
    assert json.loads((run / "hf" / "config.json").read_text())["torch_dtype"] == "float32"
    before = (run / "hf" / "model.safetensors").read_bytes()
    stopped = override(exporting, ["--resume", str(run), "--steps", "4", "--exit_interval", "3"])
    assert train(stopped) == 0  # before the last step
    assert (run / "hf" / "model.safetensors").read_bytes() == before
    assert train(override(exporting, ["--resume", str(run), "--steps", "4"])) == 0
    assert (run / "hf" / "model.safetensors").read_bytes() != before
    assert_is_the_model(run)
    assert not list(run.glob(".hf*"))
    # A process that was killed while it wrote is made up for.
    (run / "hf").rename(run / ".hf.former")
    capsys.readouterr()
    assert train(override(exporting, ["--resume", str(run)])) == 0
    assert "left to do: Hugging Face folder" in capsys.readouterr().out
    assert_is_the_model(run)
    assert not list(run.glob(".hf*"))
    os.utime(run / "hf", (0, 0))  # of an earlier step
    assert train(override(exporting, ["--resume", str(run)])) == 0
    assert (run / "hf").stat().st_mtime > 0
    assert train(override(exporting, ["--resume", str(run)])) == 0
    assert "nothing is left to do" in capsys.readouterr().out.rpartition("left to do: Hugging")[2]


@pytest.mark.parametrize("plan", ["tp2_sp", "dp2_zero3", "pp2"])
def test_ranks_leave_one_folder(exporting, plan):
    assert pool().run(2, train, replace(exporting, plan=plan))[0] == 0
    (run,) = Path(exporting.runs).iterdir()
    assert_is_the_model(run)


def test_a_disk_that_takes_the_checkpoint_alone(exporting):
    """Ranks write parts of the model, of which the folder has one file."""
    sharded = replace(exporting, plan="dp4_zero3", micro_batch_size=2)
    code, told = pool().run(4, train_with_files_of_at_most, 120_000, sharded)[0]
    (run,) = Path(exporting.runs).iterdir()
    assert code == 0 and "the run is done, write the folder later: dtgpt convert" in " ".join(told.split())
    assert not [path for path in run.iterdir() if "hf" in path.name]
    assert train(override(exporting, ["--resume", str(run), "--plan", "dp1"])) == 0
    assert_is_the_model(run)


def test_adapters_are_a_folder_of_peft(exporting, capsys):
    assert train(replace(exporting, name="base")) == 0
    base = next(Path(exporting.runs).glob("base-*"))
    adapted = replace(exporting, init_from=str(base / "hf"), lora=LoraConfig(rank=4), name="adapted")
    assert train(adapted) == 0
    (run,) = Path(exporting.runs).glob("adapted-*")
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "hf")
    theirs = peft.PeftModel.from_pretrained(model, str(run / "hf"))
    with torch.no_grad():
        found = theirs(TOKENS).logits
    torch.testing.assert_close(dtgpt.load(run, device="cpu")(TOKENS), found, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_written_is_told(exporting, monkeypatch, capsys):
    other = Track3Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257)
    with pytest.raises(UserError, match=r"Hugging Face folder"):
        train(replace(exporting, model=other))
    assert not Path(exporting.runs).exists()

    def fail(*_):
        raise UserError("the disk is full; free space")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_huggingface", fail)
        assert train(exporting) == 0  # which is whole
    (run,) = Path(exporting.runs).iterdir()
    told = f"the disk is full; free space; the run is done, write the folder later: dtgpt convert {run} FOLDER --to hf"
    assert told in " ".join(capsys.readouterr().err.split()) and not (run / "hf").exists()
    assert train(override(exporting, ["--resume", str(run)])) == 0
    before = (run / "hf" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_huggingface", fail)
        assert train(override(exporting, ["--resume", str(run), "--steps", "3"])) == 0
    assert (run / "hf" / "model.safetensors").read_bytes() == before  # that of the earlier step
    assert not list(run.glob(".hf*"))
