"""What a run records of each of its starts."""

import json
from unittest import mock

import pytest
import torch

from dtgpt.charts.plot import plot_runs
from dtgpt.compare.starts import code_digest, read_starts
from dtgpt.compare.two_runs import compare_runs
from dtgpt.parallel.launch import code_digests
from dtgpt.train.loop import train
from tests.support.runs import change, newest_run


def test_a_resumed_run_records_each_start_and_compares_with_an_uninterrupted_one(recipe, tmp_path):
    recipe = change(recipe, steps=6, optimizer={"decay_steps": 10}, log={"sample_tokens": 0})
    train(recipe)
    whole = newest_run(recipe)
    train(change(recipe, steps=3, micro_batch_size=2, runs=str(tmp_path / "halves")))
    half = tmp_path / "halves" / "test-001"
    train(change(recipe, micro_batch_size=8, seed=recipe.seed, resume=str(half)))
    first, second = read_starts(half)
    assert (first["step"], second["step"], first["before"]) == (0, 3, {})
    assert second["before"]["micro_batch_size"] == 2 and second["before"]["steps"] == 3
    assert (first["micro_batch_size"], second["micro_batch_size"], second["precision"]) == (2, 8, "fp32")
    assert first["torch"] == torch.__version__ and first["plan"] == "single" and first["world"] == 1
    environment = json.loads((half / "environment.json").read_text())
    assert environment["code"] == code_digests() and second["code"] == code_digest(code_digests())
    assert second["data"] == environment["data"]["digest"]
    two = compare_runs(whole, half, None, {"fp32": 1e-5, "bf16": 2e-3})
    assert two.parting is None and two.tolerance.value == 1e-5 and two.steps == [1, 2, 3, 4, 5, 6]
    assert all(two.groups[name].is_equal for name in ("data", "code"))
    (size,) = two.groups["execution"].fields
    assert size == ("micro_batch_size", "4", "8") and two.groups["recipe"].is_equal


def test_odd_lines_of_starts_stay_as_they_are_whatever_they_hold(recipe):
    """Lines that hold no start are left out; none of them ends the resume."""
    recipe = change(recipe, steps=2, log={"sample_tokens": 0})
    train(recipe)
    starts = newest_run(recipe) / "starts.jsonl"
    deep = b"[" * 900 + b"]" * 900
    odd = [
        b'{"step": 1, "plan": %s}' % value for value in (b"3", b'{"a": []}', b"NaN", b"9" * 4000, deep, b'"\\ud800"')
    ]
    none = [b'{"step": "x"}', b'{"step": -1}', b'{"step": 1%s}' % (b"0" * 30), b"\xff", b"[1]", b'{"st']
    (first,) = starts.read_bytes().splitlines()
    starts.write_bytes(b"\n".join([first, *odd, *none]))
    assert read_starts(newest_run(recipe))[0] == json.loads(first)
    train(change(recipe, steps=3, seed=recipe.seed, resume=str(newest_run(recipe))))
    assert starts.read_bytes().splitlines()[:-1] == [first, *odd] and read_starts(newest_run(recipe))[-1]["step"] == 2


@pytest.mark.slow(2)
def test_a_run_with_odd_metrics_goes_on_to_its_end(recipe):
    """The picture and the line of losses at the end are of what can be drawn."""
    recipe = change(recipe, steps=2, log={"sample_tokens": 0, "tensorboard": True})
    train(recipe)
    metrics = newest_run(recipe) / "metrics.jsonl"
    odd = [
        f'{{"step": {step}, "loss": {value}}}\n' for step in (1, 2) for value in ('"x"', "[1]", "NaN", "1" * 999, "{}")
    ]
    metrics.write_text(metrics.read_text() + "".join(odd))
    with mock.patch("dtgpt.charts.observers.plot_runs", plot_runs):  # not the short form of the tests
        assert train(change(recipe, steps=3, resume=str(newest_run(recipe)))) == 0
    assert metrics.read_text().count('"loss": "x"') == 2 and (newest_run(recipe) / "loss.png").stat().st_size > 1000
