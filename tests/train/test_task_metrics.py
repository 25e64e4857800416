"""Tasks that a run measures while it trains: the figures of `dtgpt eval` under every plan, and an equal loss curve."""

import json

import pytest
import torch

from dtgpt.charts.plot import main_figures
from dtgpt.evaluation.command import command
from dtgpt.evaluation.in_training import TaskEvaluation
from dtgpt.inference.request import LOGITS
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support import bodies_train as bodies
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run, on_cuda, training
from tests.support.trained import trained

pytestmark = pytest.mark.slow(4)

ENDINGS = ["makes one.", "makes two of them.", "is", "makes three or more."]


@pytest.fixture
def files(tmp_path):
    items = [{"ctx": f"{n} and {n + 1}", "label": n % 4, "endings": ENDINGS} for n in range(11)]
    (tmp_path / "hs.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "my lambada.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(6)))
    return tmp_path


@pytest.fixture
def recipe(recipe, files):
    tasks = f"hellaswag:{files}/hs.jsonl 'lambada:{files}/my lambada.txt'"
    log = {"eval_tasks": tasks, "eval_interval": 2, "sample_tokens": 0, "eval_tasks_interval": None}
    return change(recipe, steps=3, log=log, model={"num_layers": 2, "seq_length": 32}, micro_batch_size=2)


def measured(trainer, interrupted=lambda: False):
    tasks = TaskEvaluation(trainer.log, trainer.steps)
    tasks.prepare(trainer)
    return tasks.measure(trainer, interrupted)


def figures(run) -> dict[int, dict[str, float]]:
    records = [r for r in read_records(run / "metrics.jsonl") if any("/" in name for name in r)]
    return {r["step"]: {name: value for name, value in r.items() if "/" in name} for r in records}


def test_logits_that_are_not_finite_are_no_result(recipe, capsys):
    """And no reason to end a run, whose loss is."""
    trainer = training(recipe)
    with torch.no_grad():
        trainer.stages[0].embedding.wpe.weight[20] = torch.nan  # which no passage of LAMBADA reaches
    results = measured(trainer)
    assert [result.task for result in results] == ["lambada"]
    assert f"warning: hellaswag at step 0 has no result: {LOGITS}\n" in capsys.readouterr().err


def test_a_run_measures_its_tasks_and_loses_no_bit(recipe, files, capsys):
    assert train(recipe) == 0
    run, out = newest_run(recipe), capsys.readouterr().out
    found = figures(run)
    assert list(found) == [2, 3]
    assert list(found[3]) == [
        "hellaswag/acc_norm", "hellaswag/acc", "lambada/acc", "lambada/correct", "lambada/ppl"
    ]  # fmt: skip
    assert f"step 2: hellaswag: acc_norm {found[2]['hellaswag/acc_norm']:.4f}  acc" in out
    output = files / "eval.json"
    words = ["--task", "lambada", "hellaswag", "--data", f"{files}/my lambada.txt", f"{files}/hs.jsonl"]
    assert command([str(run), *words, "--output", str(output), "--device", "cpu"]) == 0
    for result in json.loads(output.read_text())["results"]:
        for name, value in result["metrics"].items():
            if not name.endswith("_stderr"):
                assert found[3][f"{result['task']}/{name}"] == pytest.approx(value, rel=1e-5)
    assert train(change(recipe, log={"eval_tasks": None})) == 0
    assert losses(newest_run(recipe)) == losses(run)
    assert not figures(newest_run(recipe))


def test_a_plan_has_the_same_figures(recipe):
    recipe = change(recipe, log={"eval_tasks_interval": 0})
    alone = figures(trained(recipe))
    assert list(alone) == [3]
    assert pool().run(4, bodies.train_until, change(recipe, plan="tp2_sp_pp2"), -1, 0) == [0] * 4
    assert figures(newest_run(recipe))[3] == pytest.approx(alone[3], rel=1e-3)


def test_a_run_that_was_killed_before_its_tasks_measures_them_when_it_goes_on(recipe, capsys):
    recipe = change(recipe, log={"eval_tasks_interval": 0})
    run = trained(recipe)
    expected = figures(run)[3]
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "hellaswag" not in line]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
    capsys.readouterr()
    assert train(change(recipe, resume=str(run))) == 0
    assert "left to do: tasks" in capsys.readouterr().out
    assert figures(run)[3] == expected
    assert train(change(recipe, resume=str(run))) == 0
    assert "nothing is left to do" in capsys.readouterr().out


@pytest.mark.picture
def test_a_limit_and_the_picture(recipe):
    assert train(change(recipe, steps=1, log={"eval_tasks_limit": 3})) == 0
    run = newest_run(recipe)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert 3 * figures(run)[1]["hellaswag/acc"] % 1 == pytest.approx(0)
    assert main_figures({"step": 1, "a/x": 1, "a/y": 2, "loss": 3, "b/z": 4}) == ["b/z", "a/x"]


@pytest.mark.parametrize("tasks, words", [
    ("hellaswag", "hellaswag is not a task with its file"), ("hellaswag:", "is not a task with its file"),
    ("piqa:x", "there is no task piqa"), ("lambada:x lambada:y", "has lambada twice"),
    ("'lambada:x", "close the quotes"),
    ("lambada:/no/such", "/no/such cannot be read .No such file or directory.; LAMBADA's"), ("", "no task is given"),
])  # fmt: skip
def test_tasks_that_cannot_be_measured_are_told_before_a_run_begins(recipe, tmp_path, tasks, words):
    with pytest.raises(UserError, match=words):
        train(change(recipe, log={"eval_tasks": tasks}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.compiler
def test_compiled_stages_measure_the_same(recipe):
    found = [measured(training(change(recipe, compile=compiled))) for compiled in ("on", "off")]
    assert found[0] == found[1]


def test_a_request_to_end_leaves_tasks_out(recipe):
    assert measured(training(recipe), lambda: True) is None


@pytest.mark.cuda
def test_captured_steps_lose_no_bit(recipe):
    """Tasks between replayed steps change nothing of them."""
    recipe = on_cuda(recipe, log={"eval_tasks_interval": 3, "eval_interval": 0, "interval": 1})
    assert train(recipe) == 0
    run = newest_run(recipe)
    assert len(figures(run)) == 14
    assert train(change(recipe, log={"eval_tasks": None})) == 0
    assert losses(newest_run(recipe)) == losses(run)
