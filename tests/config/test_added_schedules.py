"""The learning-rate schedule of `tests/support/example_schedule.py`, which no other file names."""

import json
import os

import pytest

from dtgpt.config.recipe import Recipe
from tests.promises.test_capabilities import PLAIN
from tests.support.core import ROOT
from tests.support.fresh import run_fresh
from tests.support.runs import change

PROGRAM = """
from dtgpt.capabilities import CAPABILITIES
from dtgpt.cli import main
from dtgpt.util import seams

seams.use([*(module for module, _ in CAPABILITIES), "tests.support.example_schedule"])

def call(*words):
    try:
        main(list(words))
    except SystemExit as end:
        print("exit", end.code, flush=True)

call("train", "plain.py", "--help-all")
call("train", "plain.py", "--optimizer.schedule", "inverse_sqrt", "--inverse_sqrt.shift", "9")
call("train", "plain.py", "--inverse_sqrt.shift", "2", "--steps", "1")
call("train", "plain.py", "--optimizer.schedule", "inverse_sqrt", "--optimizer.min_lr", "1")
call("train", "plain.py", "--optimizer.schedule", "inverse")
call("train", "plain.py", "--optimizer.schedule", "inverse_sqrt", "--inverse_sqrt.shift", "2",
     "--optimizer.warmup", "1", "--optimizer.min_lr", "1e-4")
call("train", "plain.py", "--resume", "auto", "--steps", "6")
"""


@pytest.mark.slow(4)
def test_a_file_adds_a_schedule_with_its_option_and_its_rule(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN.replace("steps=2", "steps=4"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "DTGPT_CACHE": str(tmp_path / "cache")}
    done = run_fresh(["-c", PROGRAM], tmp_path, environment)
    told = done.stdout.split("exit ")
    assert [part[0] for part in told[1:]] == list("0202200"), done.stdout + done.stderr
    assert "one of cosine, linear, constant, wsd, inverse_sqrt [cosine]" in " ".join(told[0].split())
    assert "inverse_sqrt.shift=9 is above the schedule's end, 4; lower it" in done.stderr
    assert "inverse_sqrt.shift=2 has no effect with optimizer.schedule=cosine" in done.stdout + done.stderr
    assert "optimizer.min_lr=1.0 is above optimizer.lr=0.001" in done.stderr
    assert "use one of cosine, linear, constant, wsd, inverse_sqrt" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "runs/plain-002/metrics.jsonl").read_text().splitlines()]
    rates = {record["step"]: record["lr"] for record in records if "lr" in record}
    expected = {1: 1e-3} | {step: 1e-4 + 9e-4 * (1 + (step - 2) / 2) ** -0.5 for step in range(2, 7)}
    assert rates == pytest.approx(expected)  # of a run of four steps, and of the two with which it went on
    (saved,) = (tmp_path / "runs/plain-002/checkpoints").glob("*6/state.json")
    assert json.loads(saved.read_text())["schedule"]["shape"] == "inverse_sqrt"


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_options_of_another_schedule_than_the_recipes_are_noted(recipe: Recipe, kind):
    changed = change(recipe, optimizer={"schedule": kind, "wsd_decay": 0.5})
    notes = [note for note in changed.notes(changed.choose_plan(1), "cpu") if "wsd_decay" in note]
    sentence = f"optimizer.wsd_decay=0.5 has no effect with optimizer.schedule={kind}"
    assert notes == ([] if kind == "wsd" else [sentence])
