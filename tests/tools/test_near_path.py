"""Paths that somebody may have meant."""

from pathlib import Path

from dtgpt.tools.near_path import near_path
from dtgpt.util.storage import did_you_mean


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
