"""Values and paths in messages."""

import tempfile
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.util.errors import did_you_mean, near_path, sentence_of


def test_the_nearest_path_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2_tiny-001", "gpt2_tiny-002", "llama_tiny-001"):
        (tmp_path / "runs" / name / "checkpoints" / "step_00000010").mkdir(parents=True)
    paths = {
        "runs/gpt2_tiny-01": "runs/gpt2_tiny-001", "runs/gpt2-tiny-002": "runs/gpt2_tiny-002",
        "run/llama_tiny-001/": "runs/llama_tiny-001", "runs/lama_tiny-001/checkpoin": "runs/llama_tiny-001/checkpoints",
        str(tmp_path / "runs" / "gpt2_tiny"): str(tmp_path / "runs" / "gpt2_tiny-002"),
    }  # fmt: skip
    for path, near in paths.items():
        assert str(near_path(Path(path))) == near
    for path in (
        "runs/gpt2_tiny-001",
        "nothing/like/it",
        "",
        "/",
        "../nowhere-near",
        "runs/" + "x" * 9999,
        "runs/\ud800",
    ):
        assert near_path(Path(path)) is None
    assert did_you_mean(Path("run"), "give one") == "did you mean runs?"
    assert did_you_mean(Path("other"), "give one") == "give one"


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
