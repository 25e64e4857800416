"""Values and paths in messages."""

import tempfile
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.util.errors import sentence_of


@pytest.mark.parametrize("words", [
    ["generate", "RUN"], ["serve", "RUN"], ["inspect", "RUN"], ["eval", "RUN", "--task", "lambada", "--data", "x"],
    ["convert", "RUN", "target", "--to", "hf"], ["plot", "RUN"], ["compare", "RUN", "RUN"],
    ["train", "mine.py", "--resume", "RUN"],
])  # fmt: skip
def test_every_command_names_the_run_that_was_meant(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "mine-001"
    run.mkdir(parents=True)
    (run / "recipe.json").write_text("{}")
    (tmp_path / "mine.py").write_text((Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py").read_text())
    with pytest.raises(SystemExit, match="2"):
        main([word.replace("RUN", "runs/mine-01") for word in words])
    assert "runs/mine-01 does not exist; did you mean runs/mine-001?" in capsys.readouterr().err


def test_a_recipe_file_that_was_meant_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_tiny.py").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["train", "gpt_tiny.py"])
    assert "there is no recipe file gpt_tiny.py; did you mean gpt2_tiny.py?" in capsys.readouterr().err


def test_no_temporary_folder_is_a_sentence(monkeypatch):
    """As where all disks are full: the error of Python is that of a missing file, which has no remedy."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null/no"])
    with pytest.raises(OSError) as failed:
        tempfile.gettempdir()
    sentence = sentence_of(failed.value)
    assert sentence is not None and "['/dev/null/no']; free space there, or set TMPDIR" in sentence
