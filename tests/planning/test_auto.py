"""`--plan auto` in training: chosen once, written to the run, kept by a resume, with the curve of one process."""

import json
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.run.records import read_records
from tests.support.programs import TORCHRUN, run_program

pytestmark = pytest.mark.slow(5)

TINY = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"
SMALL = ["--model.num_layers", "2", "--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16"]
SMALL += ["--device", "cpu", "--log.eval_samples", "8", "--log.interval", "1", "--log.sample_tokens", "0",
          "--optimizer.decay_steps", "3"]  # fmt: skip


def losses_of(run: Path) -> list[float]:
    return [record["step_loss"] for record in read_records(run / "metrics.jsonl") if "step_loss" in record]


def plan_of(run: Path) -> str:
    return json.loads((run / "recipe.json").read_text())["plan"]


def trained(*words) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", str(TINY), *SMALL, *words])
    assert not stop.value.code


def test_auto_follows_one_process_and_a_resume_keeps_it_unless_the_processes_change(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    two = [*TORCHRUN, "--nproc-per-node", "2", TINY, *SMALL, "--runs", "auto"]
    begun = run_program([*two, "--plan", "auto", "--steps", "1"], tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert begun.stdout.count("plan auto: ") == 1
    (run,) = (tmp_path / "auto").iterdir()
    chosen = plan_of(run)
    assert chosen.endswith(" | auto") and json.loads((run / "environment.json").read_text())["world"] == 2

    kept = run_program([*two, "--resume", "auto", "--steps", "2"], tmp_path)
    assert kept.returncode == 0, kept.stderr
    assert "plan auto: " not in kept.stdout and plan_of(run) == chosen

    trained("--runs", "auto", "--resume", "auto", "--steps", "3")
    assert "plan auto: single on 1 process" in capsys.readouterr().out and plan_of(run) == "single | auto"

    trained("--runs", "one", "--plan", "single", "--steps", "3")
    (reference,) = (tmp_path / "one").iterdir()
    assert len(losses_of(run)) == 3
    assert losses_of(run) == pytest.approx(losses_of(reference), rel=1e-6)
