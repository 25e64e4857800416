"""Receipts of runs of all kinds: they go on, are cut back, and their steps are computed again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.config.overrides import apply_overrides
from dtgpt.config.sections import LogConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.receipts import audit as auditing
from dtgpt.receipts import recompute as recomputing
from dtgpt.receipts.answers import FILE as ANSWERS
from dtgpt.receipts.audit import audit, report_of_files
from dtgpt.receipts.book import FILE, read_lines
from dtgpt.receipts.check import Receipts
from dtgpt.receipts.command import command
from dtgpt.receipts.config import ReceiptsConfig
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.altered_runs import checkpoint
from tests.support.audits import audited, recipe_of_sums, tiny, train_with_receipts, with_receipts
from tests.support.programs import run_program
from tests.support.runs import newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(12)
EXACT = {"reduce": "exact"}


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    monkeypatch.setattr(auditing, "start_processes", audited)


@pytest.fixture
def recipe(tmp_path):
    return tiny(tmp_path)


def run_of(recipe, steps=6, **options) -> Path:
    """Return a run of one process, which is made once."""
    return trained(with_receipts(recipe, steps, **options))


def check(run, step=None, steps=1, plan="single"):
    return audit(run, step, steps, plan, None, None)


def lines(run):
    """Return the lines of a run without what two runs may differ in."""
    found = [json.loads(line.text) for line in read_lines(run)]
    return [{k: v for k, v in line.items() if k != "before"} for line in found if "receipts" not in line]


@pytest.mark.parametrize("plan, precision", [("dp2", "fp32"), ("zero3", "bf16"), ("pp2", "bf16")])
def test_lines_do_not_depend_on_the_plan(recipe, plan, precision):
    other = train_with_receipts(recipe, 4, plan, 2, **EXACT, precision=precision)
    assert lines(run_of(recipe, 4, **EXACT, precision=precision)) == lines(other)
    assert check(other, 3, 2)["steps"]["verdict"] == "equal"


def test_muon(recipe):
    run = train_with_receipts(recipe, 4, **EXACT, optimizer=MuonConfig(lr=1e-2))
    assert check(run)["status"] == 0
    assert check(run, 4, plan="zero2")["steps"]["verdict"] == "equal"


def test_other_sums_are_within_rounding(recipe):
    run = run_of(recipe)
    for plan in ("dp2", "tp2", "cp2"):
        found = check(run, 3, 1, plan)["steps"]
        assert (found["verdict"], found["exact"], len(found["why_not_exact"])) == ("rounding", False, 1), plan
    shutil.rmtree(checkpoint(run, 4))
    text = (run / FILE).read_text()
    loss = json.loads(next(line for line in text.splitlines() if '"step": 3' in line))["loss"]
    (run / FILE).write_text(text.replace(repr(loss), repr(loss * 1.001)))
    found = check(run, 3, 1, "tp2")["steps"]["first_difference"]
    assert (found["kind"], found["step"], found["verdict"]) == ("loss", 3, "fault")


def test_a_run_goes_on_with_the_lines_of_one_that_did_not_stop(recipe):
    run = train_with_receipts(recipe, 6, **EXACT, exit_interval=3)
    assert [line.get("step") for line in lines(run)][-1] is None  # that of the checkpoint at the end
    train_with_receipts(recipe, 6, **EXACT, resume=str(run), plan="dp2", world=2)
    kept = [line for line in lines(run) if line.get("checkpoint") != 3]
    assert kept == lines(run_of(recipe, **EXACT))
    assert check(run)["status"] == 0
    assert check(run, 4, 2)["steps"]["verdict"] == "equal"


@pytest.mark.parametrize("interval", [50, 3])
def test_mean_losses_are_those_of_the_intervals_of_a_run(recipe, interval):
    """The first step and the last one are recorded, too, within an interval that neither of them ends."""
    log = LogConfig(interval=interval, eval_interval=0, eval_samples=4, sample_tokens=0)
    run = train_with_receipts(recipe, 7, exit_interval=5, log=log)
    train_with_receipts(recipe, 7, resume=str(run), log=log)
    assert check(run)["status"] == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    next(record for record in reversed(records) if "loss" in record)["loss"] += 1e-3
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert check(run)["status"] == 1


def test_lines_that_a_killed_process_did_not_write_are_those_of_its_checkpoint(recipe):
    run = run_of(recipe)
    whole = (run / FILE).read_bytes()
    kept = whole.splitlines(keepends=True)
    torn = next(i for i, line in enumerate(kept) if line.startswith(b'{"step": 4'))
    (run / FILE).write_bytes(b"".join(kept[:torn]) + kept[torn][:50])
    shutil.rmtree(checkpoint(run, 6))
    assert "half written" in report_of_files(Receipts(run), [])
    train_with_receipts(recipe, 6, resume=str(run))
    before = [line for line in whole.splitlines() if b'"receipts"' not in line]
    assert [json.loads(line)["digests"] for line in before] == [line["digests"] for line in lines(run)]
    assert check(run)["status"] == 0


def test_a_run_is_cut_back_to_an_older_checkpoint(recipe):
    run = run_of(recipe)
    train_with_receipts(recipe, 6, resume=str(checkpoint(run, 2)))
    assert [line["step"] for line in lines(run) if "step" in line] == [1, 2, 3, 4, 5, 6]
    assert sum(line.is_start for line in read_lines(run)) == 2
    assert check(run)["status"] == 0


def test_answers_and_rewards_are_kept_and_given_back(tmp_path):
    recipe = recipe_of_sums(tmp_path, steps=3)
    run = train_with_receipts(recipe, 3, "dp2", 2, micro_batch_size=recipe.micro_batch_size, **EXACT)
    assert len((run / ANSWERS).read_text().splitlines()) == 3
    assert check(run)["status"] == 0
    assert check(run, 3)["steps"]["verdict"] == "equal"
    kept = [json.loads(line) for line in (run / ANSWERS).read_text().splitlines()]
    kept[2]["answers"][0][-1] += 1.0  # a reward
    (run / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = check(run, 3)["steps"]["first_difference"]
    assert (found["kind"], found["step"]) == ("answers", 3)
    with (run / ANSWERS).open("a") as file:
        file.write('{"step": 4, "answ')  # by a process that was killed
    resumed = {"micro_batch_size": recipe.micro_batch_size, "resume": str(checkpoint(run, 2))}
    train_with_receipts(recipe, 3, **EXACT, **resumed)
    assert [json.loads(line)["step"] for line in (run / ANSWERS).read_text().splitlines()] == [1, 2, 3]
    assert check(run, 3)["steps"]["verdict"] == "equal"
    (run / ANSWERS).unlink()
    with pytest.raises(UserError, match=r"answers.jsonl has no answers of step 3; choose another step"):
        check(run, 3)


def test_the_command_starts_a_process_that_computes_steps_again(recipe, tmp_path, monkeypatch, capsys):
    def run_workers(world: int, words: list[str]) -> str | None:
        done = run_program(["-m", "dtgpt", *words], tmp_path)
        return done.stderr if done.returncode else None

    monkeypatch.setattr(recomputing, "run_workers", run_workers)
    monkeypatch.setattr(auditing, "start_processes", recomputing.start_processes)
    file = tmp_path / "recipe.py"
    file.write_text(f"""
from pathlib import Path
from tests.support.audits import tiny

def recipe():
    return tiny(Path({str(tmp_path)!r}))
""")
    words = ["audit", str(run_of(recipe)), "--step", "3", "--recipe", str(file), "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0 and "step 3, computed again, has the bits of its receipt" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([*words[:-1], "cpus"])
    assert end.value.code == 2 and "is not known; use recorded, cpu or cuda" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"dtgpt recompute is internal to dtgpt audit"):
        recomputing.work(words)


@pytest.mark.parametrize(("word", "device"), [("", None), ("recorded", None), ("as it was", None), ("cpu", "cpu")])
def test_the_device_is_that_of_the_run_or_another(monkeypatch, word, device):
    """Also by the words of 0.3.0, "as it was"."""
    asked = []
    monkeypatch.setattr(auditing, "audit", lambda *words: asked.append(words[4]) or {"status": 0})
    command(["runs/a-001", "--step", "3", *(["--device", word] if word else [])])
    assert asked == [device]


def test_the_report_says_which_steps_can_be_computed_again(recipe, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(run_of(recipe), run)
    kept = [step for step in range(2, 7) if (run / f"checkpoints/step_{step:08d}").exists()]
    assert kept == [2, 4, 6]
    line = "steps 3 to 6 can be computed again, from the checkpoint of step 2 or 4: dtgpt audit"
    assert f"  {line} {run} --step N\n" in report_of_files(Receipts(run), [])
    shutil.rmtree(run / "checkpoints/step_00000002")
    assert "  steps 5 to 6 can be computed again, from the checkpoint of step 4:" in report_of_files(Receipts(run), [])
    shutil.rmtree(run / "checkpoints/step_00000004")
    assert "can be computed again" not in report_of_files(Receipts(run), [])


def test_bad_input_is_one_sentence(recipe, tmp_path):
    run = train_with_receipts(recipe, 4)
    with pytest.raises(UserError, match=r"step 2 is computed again .* keeps those of steps 2, 4"):
        check(run, 2)
    with pytest.raises(UserError, match=r"step 9 has no receipt .*the newest is of step 4"):
        check(run, 9)
    with pytest.raises(UserError, match=r"plan dp3 has 3 replicas, and a step of .* 4 micro-batches"):
        check(run, 3, plan="dp3")
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("7", "8"))
    with pytest.raises(UserError, match=r"is not what .* was trained on"):
        check(run, 3)
    text.unlink()
    with pytest.raises(UserError, match=r"is not here"):
        check(run, 3)
    (run / FILE).unlink()
    with pytest.raises(UserError, match=r"has no receipts.jsonl; train with --receipts.on"):
        check(run)


def test_receipts_are_written_where_they_are_on(recipe):
    assert apply_overrides(recipe, ["--receipts.on"]).receipts == ReceiptsConfig(on=True)
    with pytest.raises(UserError, match=r"receipts.parts=4 has no effect without receipts; add --receipts.on"):
        replace(recipe, receipts=ReceiptsConfig(parts=4)).validate()
    assert train(replace(recipe, steps=1)) == 0
    assert not (newest_run(recipe) / FILE).exists()
