"""The tables of docs/correctness.md are those of its measurements, which lie beside the script that made them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from correctness_report import merged, summary  # noqa: E402

FILES = {  # and of which families
    "correctness_cuda.jsonl": {"gpt2", "llama"},
    "correctness_cuda_4.jsonl": {"gpt2", "llama"},
    "correctness_cpu.jsonl": {"gpt2", "llama"},
}


def results(file: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / file).read_text().splitlines()]


@pytest.mark.parametrize("file", FILES)
def test_the_page_has_the_rows_of_the_measurements(file):
    page = (ROOT / "docs" / "correctness.md").read_text().splitlines()
    rows = summary(results(file)).splitlines()
    assert len(rows) >= 4 and set(rows) <= set(page)


@pytest.mark.parametrize("file", FILES)
def test_every_plan_is_within_tolerance_in_fp32(file):
    rows = [row for row in results(file) if row["precision"] == "fp32" and row["steps"] == 20]
    assert {row["family"] for row in rows} == FILES[file]
    for row in rows:
        assert row["same_initial"] and row["loss"] <= 1e-5, row["name"]
        assert max(row["first_gradient"], row["last_gradient"], row["weight"]) <= 1e-4, row["name"]


def test_modes_with_the_same_bits_share_a_row():
    measured = dict.fromkeys(["loss", "first_gradient", "last_gradient", "weight", "travel"], 1e-7)
    case = {"family": "gpt2", "plan": "tp2", "precision": "fp32", "steps": 20, "label": "", **measured}
    modes = [("auto", "none", "a"), ("off", "none", "a"), ("auto", "full", "a"), ("off", "full", "b")]
    rows = merged([case | {"graph": g, "recompute": r, "digest": d} for g, r, d in modes])
    assert [row[4:6] for row in rows] == [["yes", "none/full"], ["no", "none"], ["no", "full"]]
    assert rows[2][-1] == "`dtgpt compare $gpt2 --plans tp2 --steps 20 --precision fp32 --graph off --recompute full`"
