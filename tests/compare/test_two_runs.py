"""`dtgpt compare RUN_A RUN_B`: runs that are equal, within rounding or part, and what differs."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.compare.history import read_curves
from dtgpt.compare.starts import code_digest
from dtgpt.compare.two_runs import distance

RECIPE = {
    "name": "tiny", "seed": 1, "steps": 30, "plan": "dp", "device": "auto", "precision": "auto", "micro_batch_size": 2,
    "optimizer": {"lr": 0.001}, "data": {"path": "a.txt", "reset_position_ids": False}, "log": {"interval": 1},
    "resume": None, "init_from": None, "exit_interval": None, "plans": {},
}  # fmt: skip
CODE = {"ops/a.py": "1", "run/b.py": "2"}


def losses(steps, change=lambda step, loss: loss):
    return [{"step": n, "samples": 4 * n, "loss": x, "step_loss": x} for n in steps if (x := change(n, 5 - n / 30))]


def start(step=0, **values):
    fixed = {
        "step": step, "plan": "single", "world": 1, "precision": "fp32", "device": "CPU, 1 thread", "torch": "2.13",
    }  # fmt: skip
    fixed |= {"micro_batch_size": 2, "git": "abc", "code": code_digest(CODE), "data": "d1", "tokenizer": "bytes"}
    return {**fixed, "before": {}, **values}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a run folder and return its path. A file that is None is left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def work(name, records, recipe=(), starts=None) -> Path:
        run = Path(name)
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        if recipe is not None:
            (run / "recipe.json").write_text(json.dumps({**RECIPE, **dict(recipe)}))
        starts = [start()] if starts is None else starts
        if starts:
            (run / "starts.jsonl").write_text("".join(json.dumps(s) + "\n" for s in starts))
        return run

    return work


@pytest.fixture
def compare(capsys):
    def work(*words):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, words)])
        out, err = capsys.readouterr()
        assert ended.value.code != 2 or (out == "" and err.count("\n") == 1), out + err
        return ended.value.code, " ".join((out + err).split())

    return work


def test_equal_curves(write, compare):
    a, b = write("a", losses(range(1, 31))), write("b", losses(range(1, 31)))
    code, out = compare(a, b)
    assert code == 0 and "equal bit for bit: all losses of 30 common steps, 1 to 30" in out
    assert all(f"{name} the same" in out for name in ("recipe", "data", "code", "execution"))


def test_rounding(write, compare):
    a = write("a", losses(range(1, 31)))
    b = write("b", losses(range(1, 31), lambda n, x: x * (1 + 3e-7 * (n > 12))), starts=[start(plan="tp2", world=2)])
    code, out = compare(a, b)
    assert code == 0 and "equal within rounding: at most 3.0e-07 (loss of the step, step" in out
    assert (
        "not above the tolerance of 1e-05 (fp32), at 30 common steps, 1 to 30; equal bit for bit up to step 12" in out
    )
    assert "execution differs" in out and "plan A single B tp2 world A 1 B 2" in out
    assert "equal within tolerance: at most" in compare(a, b, "--tolerance", 0.5)[1]
    assert compare(a, b, "--tolerance", 0)[0] == compare(b, a, "--tolerance=1e-7")[0] == 1
    sixteen = write("c", losses(range(1, 31), lambda n, x: x * 1.001), starts=[start(precision="bf16")])
    code, out = compare(a, sixteen)
    assert code == 0 and "tolerance of 0.002 (bf16)" in out and "precision A fp32 B bf16" in out


def test_the_first_step_at_which_runs_part(write, compare):
    change = lambda n, x: x * (1 + 1e-7 * (n > 3)) + (n >= 21) * 0.1  # noqa: E731
    a, b = write("a", losses(range(1, 31))), write("b", losses(range(1, 31), change), {"optimizer": {"lr": 0.01}})
    code, out = compare(a, b)
    assert code == 1 and re.search(
        r"diverge at step 21: loss of the step 4\.3 and 4\.4, 2\.3e-02 apart, the first record above the tolerance of "
        r"1e-05 \(fp32\); before it at most 1\.0e-07; equal bit for bit up to step 3 different: recipe; the same: data",
        out,
    )
    assert "optimizer.lr A 0.001 B 0.01" in out


def test_other_intervals_and_lengths(write, compare):
    """Steps are compared, and not the means of other steps."""
    mean = lambda records, by: [{**r, "loss": r["loss"] + by / 100 * (r["step"] > 1)} for r in records]  # noqa: E731
    a = write("a", mean(losses([1, *range(2, 31, 2)]), 2), {"log": {"interval": 2}})
    b = write("b", mean(losses([1, *range(3, 25, 3)]), 3), {"log": {"interval": 3}, "steps": 30})
    code, out = compare(a, b)
    assert code == 0 and "compared: the 5 common steps of 16 and 9 with a recorded loss" in out
    assert "B ends at step 24: what" in out and "steps 1 to 24 of 30, log.interval 3; it ended early or is still" in out
    assert "mean loss" not in out
    c = write("c", mean(losses([1, *range(3, 25, 3)]), 4), {"log": {"interval": 3}})
    code, out = compare(b, c)
    assert code == 1 and "diverge at step 3: mean loss of an interval" in out


def test_a_gap_before_the_step_is_named(write, compare):
    a, b = write("a", losses([1, 10, 20])), write("b", losses([1, 10, 20], lambda n, x: x + (n > 10)))
    assert "diverge at step 20" in (out := compare(a, b)[1]) and "; steps 11 to 19 have no record in common" in out


def test_held_out_losses_decide_too(write, compare):
    more = [{"step": 10, "validation_loss": 4.0}, {"step": 20, "validation_loss": 3.0}]
    a = write("a", losses(range(1, 31)) + more)
    b = write("b", [*losses(range(1, 31)), more[0], {"step": 20, "validation_loss": 3.1}])
    code, out = compare(a, b)
    assert code == 1 and "diverge at step 20: validation loss 3 and 3.1, 3.2e-02 apart" in out
    assert compare(write("c", more), write("d", more))[0] == 0  # no training loss at all


def test_what_is_not_a_number_is_not_equal(write, compare):
    bad = [*losses(range(1, 5)), {"step": 5, "step_loss": None, "loss": None}]
    a, b = write("a", losses(range(1, 6))), write("b", bad)
    assert "diverge at step 5: loss of the step is not a number in B, the first" in (out := compare(a, b)[1])
    assert "none nan 5" in out or "4 nan 5" in out
    code, out = compare(b, write("c", bad))
    assert code == 1 and "is not a number in A and B" in out
    norms = [{**r, "grad_norm": None} for r in losses(range(1, 6))]  # overflows of fp16
    assert compare(write("d", norms), write("e", norms))[0] == 0


def test_steps_that_were_taken_again_count_once(write, compare):
    """As where a run went on from step 10, twice, and its metrics kept what came before."""
    wrong = lambda n, x: x + 1  # noqa: E731
    twice = [*losses(range(1, 13)), {"step": 12, "validation_loss": 1.0}, *losses(range(11, 16), wrong)]
    a, b = write("a", twice + losses(range(11, 31))), write("b", losses(range(1, 31)))
    code, out = compare(a, b)
    assert code == 0 and "equal bit for bit" in out and "7 records of steps that were taken again later" in out
    assert "validation" not in out


def test_of_a_resumed_run_the_last_start_is_compared(write, compare):
    before = {"optimizer.lr": 0.001, "plan": "dp", "exit_interval": 10}
    starts = [start(), start(10, plan="tp2", before={"seed": 7}), start(20, plan="dp2", world=2, before=before)]
    a, b = write("a", losses(range(1, 31))), write("b", losses(range(1, 31)), {"optimizer": {"lr": 0.1}}, starts)
    code, out = compare(a, b)
    assert code == 0 and "optimizer.lr A 0.001 B 0.1" in out and "plan A single B dp2 world A 1 B 2" in out
    assert "its last start is compared; it went on after step 10, 20 (starts.jsonl)" in out and "seed" not in out


def test_a_run_that_went_on_began_with_the_weights_of_its_first_start(write, compare):
    starts = [start(), start(10, before={"init_from": "model"})]
    a, b = write("a", losses(range(1, 31)), {"init_from": "model"}), write("b", losses(range(1, 31)), starts=starts)
    assert "recipe the same" in compare(a, b)[1]
    assert "init_from A model B none" in compare(a, write("c", losses(range(1, 31))))[1]


def test_blocks_computed_again_are_none_where_a_start_says_so(write, compare):
    """In starts and recipes, no number of `recompute_blocks` is null; older versions have no such field."""
    a = write("a", losses(range(1, 31)), {"recompute_blocks": None}, [start(recompute_blocks=None)])
    b = write("b", losses(range(1, 31)), {"recompute_blocks": 1}, [start(recompute_blocks=1)])
    assert "rounding alone) recompute_blocks A none B 1 equal" in compare(a, b)[1]
    assert "recompute_blocks" not in compare(a, write("d", losses(range(1, 31)), {"recompute_blocks": None}))[1]
    older = write("older", losses(range(1, 31)))
    assert "recompute_blocks" not in compare(a, older)[1]
    out = compare(b, older)[1]
    assert "execution the same" in out and "recompute_blocks A 1 B not recorded" in out


def test_data_code_and_versions(write, compare):
    a = write("a", losses(range(1, 31)))
    more = [start(data="d2", code="x", torch="2.14")]
    out = compare(a, write("b", losses(range(1, 31)), {"data": {"path": "b.txt"}}, more))[1]
    assert "data differs" in out and "data A d1 B d2" in out and "data.path A a.txt B b.txt" in out
    assert "code differs (dtgpt's source files) code A" in out and "torch A 2.13 B 2.14" in out
    assert "data.reset_position_ids A off B not" in out
    c = write("c", losses(range(1, 31)), {"data": {"path": "b.txt", "reset_position_ids": False}})
    out = compare(a, c)[1]  # the same tokens under another name
    assert "data the same" in out and "b.txt" not in out


def test_runs_of_older_versions_and_foreign_metrics(write, compare):
    a = write("a", losses(range(1, 31)))
    old = write("old", losses(range(1, 31)), {"plan": "dp2"}, starts=())
    code, out = compare(a, old)
    assert (
        code == 0 and "code not recorded by B" in out and "plan A dp B dp2" in out and "data not recorded by B" in out
    )
    Path("theirs.jsonl").write_text("".join(json.dumps({"step": n, "loss": 5 - n / 30}) + "\n" for n in range(1, 31)))
    code, out = compare(a, "theirs.jsonl")
    assert code == 0 and "recipe not recorded by B" in out and "equal bit for bit" in out
    Path("ours.jsonl").write_text(Path("theirs.jsonl").read_text().replace("4.0", "4.1"))
    code, out = compare("--tolerance", 1e-9, "theirs.jsonl", "ours.jsonl")
    assert code == 1 and "recipe not recorded by A and B" in out
    assert "fp32, as the precision was not recorded" in compare("theirs.jsonl", "ours.jsonl")[1]


def test_numbers_of_samples_that_differ_are_told(write, compare):
    more = [{**record, "samples": 2 * record["samples"]} for record in losses(range(1, 31))]
    out = compare(write("a", losses(range(1, 31))), write("b", more))[1]
    assert "samples seen differ from step 1 on: 4 and 8: equal steps are not equal samples" in out


@pytest.mark.parametrize("words, sentence", [
    ([], "dtgpt compare needs a recipe, such as recipes/gpt2_tiny.py --plans tp2 pp2, or two runs, such as runs/"),
    (["a"], "takes two runs, and one was given; use dtgpt compare a runs/gpt2_tiny-002, or"),
    (["a", "b", "a"], "takes two runs, and 3 were given"),
    (["a", "nothing"], "nothing does not exist; give a run folder"),
    (["a", "recipe.py"], "recipe.py is a recipe, which dtgpt compare takes alone, with --plans"),
    (["recipe.py", "a"], "'a' is not an option"), (["a", "a/../a"], "a and a/../a are the same run"),
    (["a", "a/metrics.jsonl"], "are the same run"), (["a", "link"], "a and link are the same run"),
    (["a", "."], ". holds 5 run folders; give two of them, such as"),
    (["a", "bare"], "bare is not a run folder (it has no metrics.jsonl)"),
    (["a", "empty"], "empty has no losses yet, so that there is nothing to compare"),
    (["a", "torn"], "torn has 2 lines that hold no record, so that there is nothing"),
    (["a", "fifo"], "fifo is neither a folder nor a file"),
    (["a", "late/checkpoints/step_00000010"], "is a checkpoint; give its run, "),
    (["a", "late"], "a has losses of steps 1 to 5 and late has losses of steps 6 to 9: the runs have no step in"),
    (["a", "late", "--plans", "dp2"], "--plans belongs to dtgpt compare RECIPE.py"),
    (["--steps", "3", "a", "late"], "--steps belongs to dtgpt compare RECIPE.py"),
    (["a", "late", "--output", "x.png"], "--output is an option of dtgpt plot, which draws both runs"),
    (["a", "late", "--tolerance", "-1"], "--tolerance=-1.0 is out of range"),
])  # fmt: skip
def test_mistakes_are_one_sentence(write, compare, words, sentence):
    write("a", losses(range(1, 6)))
    write("late", losses(range(6, 10)))
    write("empty", [{"step": 1, "save_seconds": 1.0}])
    Path("bare").mkdir()
    write("torn", []).joinpath("metrics.jsonl").write_text('{"step": 1, "loss": 2\n{"st')
    Path("link").symlink_to("a")
    os.mkfifo("fifo")
    checkpoint = Path("late/checkpoints/step_00000010")
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    Path("recipe.py").write_text("from dtgpt.config.recipe import Recipe\ndef recipe(): return Recipe()\n")
    Path("recipe.py").write_bytes((Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py").read_bytes())
    code, out = compare(*words)
    assert code == 2 and sentence in out, out


@pytest.mark.slow(2)
@pytest.mark.parametrize("name, content", [
    ("metrics.jsonl", b'{"step": 1, "step_loss": 1e400}\n{"step": 2, "step_loss": %s}\n' % (b"9" * 4000)),
    ("metrics.jsonl", b'{"step": 1, "step_loss": "\\u001b[2J", "loss": [1], "x/y": {}}\n'),
    ("metrics.jsonl", b'{"step": true, "loss": 1}\n{"step": -1, "loss": 1}\n{"step": 2, "loss": 1.7e308}\n'),
    ("metrics.jsonl", b'{"step": 1, "step_loss": -1.7e308}\n{"step": 9007199254740992, "step_loss": 1.7e308}\n'),
    ("metrics.jsonl", b'{"step": 1, "step_loss": 1}\n\xff\xfe\x00' + b"[" * 100_000 + b"\n" + b"x" * (3 << 20)),
    ("metrics.jsonl", b'{"step": 3, "loss": 0}\n{"step": 2, "loss": 5e-324}\n{"step": 2, "\\ud800/a": 1}\n{"st'),
    ("recipe.json", b"[1]"),
    ("recipe.json", b'{"seed": {"a": {}}, "log": 3, "steps": "x", "\\u001b/": "\\u001b[2J", "plan": [[]]}'),
    ("recipe.json", b'{"a":' * 500 + b"1" + b"}" * 500),
    ("starts.jsonl", b'{"step": 0, "before": 3}\n{"step": -1}\n{"step": 1e3}\n[]\n{"step": 0, "plan": {"a": []}'),
    ("starts.jsonl", b'{"step": 99999999999999999999, "before": {"seed": {}}, "precision": ["fp8"]}\n'),
    ("starts.jsonl", b'{"step": 0, "precision": "fp8", "device": 7, "code": "\\u001b[31m"}\n'),
])  # fmt: skip
def test_hostile_files_are_compared_or_refused(write, compare, name, content):
    """Without an exception, and without a control character in the output."""
    a, b = write("a", losses(range(1, 6))), write("b", losses(range(1, 6)))
    (b / name).write_bytes(content)
    for words in ([a, b], [b, a]):
        code, out = compare(*words)
        assert code in (0, 1, 2) and "\x1b" not in out


def test_distances_do_not_depend_on_the_order():
    assert distance(1.0, 1.0) == distance(0.0, 0.0) == 0 and distance(0.0, 5e-324) == 1
    assert distance(2.0, 1.0) == distance(1.0, 2.0) == 0.5 and distance(1.7e308, -1.7e308) == 2
    assert distance(math.nan, 1.0) == distance(1.0, math.nan) == distance(math.nan, math.nan) == math.inf
    assert distance(1.0, math.nextafter(1, 0)) > 0 < distance(3.0, math.nextafter(3, 4))


def test_a_long_line_is_passed_over(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"x": "' + "y" * (2 << 20) + '"}\n{"step": 2, "loss": 1}'
    )
    found = read_curves(tmp_path / "m.jsonl")
    assert found.of["loss"] == {1: 2.0, 2: 1.0} and found.unread == 1
