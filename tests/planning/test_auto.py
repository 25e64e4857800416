"""`--plan auto` in training: chosen once, written to the run, kept by a resume, with the curve of one process."""

import json
from pathlib import Path

import pytest

from dtgpt.run.records import read_records
from tests.support.programs import TORCHRUN, run_program

pytestmark = pytest.mark.slow(12)

TINY = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"
SMALL = ["--model.num_layers", "2", "--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16"]
SMALL += ["--device", "cpu", "--log.eval_samples", "8", "--log.interval", "1", "--log.sample_tokens", "0"]


def losses_of(run: Path) -> list[float]:
    return [record["step_loss"] for record in read_records(run / "metrics.jsonl") if "step_loss" in record]


def plan_of(run: Path) -> str:
    return json.loads((run / "recipe.json").read_text())["plan"]


def test_auto_follows_one_process_and_a_resume_keeps_it_unless_the_processes_change(tmp_path):
    options = [*SMALL, "--optimizer.decay_steps", "6"]
    two = [*TORCHRUN, "--nproc-per-node", "2", TINY, *options, "--runs", "auto"]
    begun = run_program([*two, "--plan", "auto", "--steps", "2"], tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert begun.stdout.count("plan auto: ") == 1
    (run,) = (tmp_path / "auto").iterdir()
    chosen = plan_of(run)
    assert chosen.endswith(" | auto") and json.loads((run / "environment.json").read_text())["world"] == 2

    kept = run_program([*two, "--resume", "auto", "--steps", "4"], tmp_path)
    assert kept.returncode == 0, kept.stderr
    assert "plan auto: " not in kept.stdout and plan_of(run) == chosen

    alone = run_program([TINY, *options, "--runs", "auto", "--resume", "auto", "--steps", "6"], tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "plan auto: single on 1 process" in alone.stdout and plan_of(run) == "single | auto"

    done = run_program([TINY, *options, "--runs", "one", "--plan", "single", "--steps", "6"], tmp_path)
    assert done.returncode == 0, done.stderr
    (reference,) = (tmp_path / "one").iterdir()
    assert len(losses_of(run)) == 6
    assert losses_of(run) == pytest.approx(losses_of(reference), rel=1e-6)
