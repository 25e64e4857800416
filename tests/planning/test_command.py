"""Plans on the command line: what is answered to a wrong one, and a right one from the start to the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.run.records import read_records
from tests.support.programs import TORCHRUN, run_program

pytestmark = pytest.mark.slow(6)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "gpt2_tiny.py"
SMALL = ["--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16", "--device", "cpu"]
SMALL += ["--log.eval_samples", "8"]


def run(words, folder, **environment) -> subprocess.CompletedProcess:
    words, environment = [sys.executable, *words], os.environ | environment
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


def sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("dtgpt: ")]


def test_a_wrong_plan_from_a_shell_is_one_sentence_at_once(tmp_path):
    """Before more is imported than torch and what a plan needs. How long that takes depends on the machine."""
    begin = sum(os.times()[2:4])
    done = run([TINY, "--plan", "tp2"], tmp_path, PYTHONPROFILEIMPORTTIME="1")
    seconds = sum(os.times()[2:4]) - begin
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in done.stderr.splitlines() if line not in rows]
    imported = {name.strip(): int(total) for _, total, name in (row.split("|") for row in rows[1:])}
    assert done.returncode == 2 and done.stdout == ""
    assert said == sentences(done.stderr) and len(said) == 1, said
    assert "tp=2" in said[0] and "start 2 (torchrun --nproc-per-node)" in said[0]
    assert not list(tmp_path.iterdir())
    assert not {"dtgpt.train.loop", "dtgpt.parallel.build", "matplotlib"} & imported.keys()
    assert seconds < 4 * imported["torch"] / 1e6


def test_the_plan_command_shows_which_alternative_is_chosen_and_why_not_the_others(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(TINY), "--plan", "tp8 | tp4 | tp2_zero1", "--world", "7", "--micro_batch_size", "4"])
    out = capsys.readouterr().out
    assert not stop.value.code
    assert out.startswith(
        "plan: tp4 (2nd of 3) on 4 processes: tp4\n"
        "3 of 7 processes wait: no alternative fits more than 4 of them\n"
        "tp8 fits none of 7 processes: the plan tp8 needs tp=8 = 8 processes for each replica, but --world is 7, which "
        "is not a multiple; use --world 8\n"
        "tp2_zero1 fits 4 of 7 processes, too, but comes after tp4\n"
    )
    assert "plan    tp4: 4 ranks" in out


PLAN = ["plan", str(TINY), "--micro_batch_size", "8"]
TRAIN = ["train", str(TINY), "--plan"]


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        # As in training, auto chooses where no alternative before it fits all processes.
        (["--plan", "tp2 | auto", "--world", "2"], "plan    tp2:", "plans of"),
        (["--plan", "tp4 | auto", "--world", "2", "--gpu", "H100"], "plans of 2 processes", "plan    tp4:"),
        (
            ["--plan", "tp2 | auto", "--world", "2", "3"],
            "refused: tp2 | auto on 3 processes: --plan 'tp2 | auto'",
            None,
        ),
        (["--plan", "auto", "--world", "2", "--device", "cpu"], "time of a step on this machine", "H200"),
    ],
)
def test_the_plan_command_chooses_where_training_does(capsys, words, shown, hidden):
    with pytest.raises(SystemExit) as stop:
        main([*PLAN, *words])
    out = capsys.readouterr().out
    assert not stop.value.code and shown in out
    assert hidden is None or hidden not in out


@pytest.mark.parametrize(
    "words, told",
    [
        ([*PLAN, "--plan", "auto", "--world", "2", "3"], ["auto on 2 processes: --plan 'auto' is to be chosen"]),
        ([*PLAN, "--device", "cpu", "--gpu", "H100"], ["--gpu H100 is about a GPU, and device=cpu plans for a CPU"]),
        ([*PLAN, "--device", "cpu", "--network", "4"], ["--network 4.0 is about a GPU"]),
        ([*PLAN, "--plan", "tp2 | dp2 | tp2"], ["the same plan twice (tp2)"]),
        (["compare", str(TINY), "--plans", "tp2 | dp2"], ["names alternatives", "give one of them"]),
        ([*TRAIN, "tp2 |"], ["no plan on one side of a '|'"]),
        ([*TRAIN, "tp4 | tp2"], ["'tp4 | tp2' fits 1 process or fewer", "start 4"]),
        ([*TRAIN, "pp2"], ["1F1B needs at least pp=2 micro-batches", "use --micro_batch_size 16"]),
        ([*TRAIN, "tp2_zreo1"], ["'zreo1'", "did you mean zero1?"]),
        ([*TRAIN, "dp4", "--micro_batch_size", "8"], ["dp=4", "start 4", "or use dp1 with 1"]),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert len(sentences(captured.err)) == captured.err.count("\n") == 1
    assert all(word in captured.err for word in told), captured.err
    assert not list(tmp_path.iterdir())


def test_all_processes_of_a_wrong_plan_say_the_same_sentence_and_leave_nothing(tmp_path):
    """torchrun adds a report of its own."""
    done = run_program([*TORCHRUN, "--nproc-per-node", "2", TINY, "--plan", "tp4"], tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    (sentence,) = set(sentences(done.stderr))
    assert "needs tp=4" in sentence and "2 were started" in sentence and "start 4" in sentence
    assert str(ROOT / "dtgpt") not in done.stderr  # no line of a traceback through dtgpt
    assert not list(tmp_path.iterdir())


def test_an_error_that_only_one_process_sees_reaches_all_as_one_sentence(tmp_path):
    """The first process alone makes the run folder."""
    (tmp_path / "file").write_text("")
    words = [TINY, *SMALL, "--plan", "tp2", "--steps", "1", "--runs", "file/runs"]
    done = run_program([*TORCHRUN, "--nproc-per-node", "2", *words], tmp_path)
    assert done.returncode != 0
    (sentence,) = set(sentences(done.stderr))
    assert "runs=file/runs" in sentence and "another --runs" in sentence
    assert str(ROOT / "dtgpt") not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_of_two_processes_is_one_run(tmp_path):
    """One voice, one run folder, which knows its plan."""
    options = ["--plan", "tp2_sp", "--steps", "2", "--log.interval", "1", "--log.sample_tokens", "4"]
    done = run_program([*TORCHRUN, "--nproc-per-node", "2", TINY, *SMALL, *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plan    tp2_sp\n" in done.stdout and "device  2 x CPU" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")].count("2/2") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["world"] == 2 and environment["plan"] == "tp2_sp"
    assert [r["step"] for r in read_records(folder / "metrics.jsonl") if "loss" in r] == [1, 2]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_groups_on_gpus_are_made_without_a_warning(tmp_path):
    """Two dimensions of the mesh are split from the group of all ranks, one with options of NCCL."""
    world = "4" if torch.cuda.device_count() >= 4 else "2"
    plan = "tp2_pp2" if world == "4" else "tp2"
    done = run_program([*TORCHRUN, "--nproc-per-node", world, TINY, "--plan", plan, "--steps", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ProcessGroupGloo" not in done.stderr
