"""`dtgpt inspect` of token files prints what Megatron-LM's own code gave for the same data."""

import json
from pathlib import Path

import numpy as np
import pytest

from dtgpt.cli import main
from dtgpt.data.indexed import IndexedWriter

FACTS = json.loads((Path(__file__).parent / "data" / "megatron_samples.json").read_text())


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Prefixes of the fixtures' corpora, made as their README says."""
    folder, made = tmp_path_factory.mktemp("corpora"), {}
    for name, corpus in FACTS["corpora"].items():
        rng, end = np.random.default_rng(corpus["seed"]), corpus["vocab"] - 1
        with IndexedWriter(folder / name, corpus["dtype"]) as writer:
            for length in rng.integers(corpus["lo"], corpus["hi"], corpus["n_docs"]):
                writer.append(np.append(rng.integers(0, end, int(length)), end))
                writer.end_document()
        made[name] = str(folder / name)
    return made


def said(capsys, *words) -> str:
    with pytest.raises(SystemExit) as done:
        main(["inspect", *words])
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    return out


def options(case) -> list[str]:
    given = {"split": case["split"], "subset": case["which"], "seq-length": case["seq_length"], "seed": case["seed"]}
    given |= {} if case["num_samples"] is None else {"num-samples": case["num_samples"]}
    return ["--digest", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.mark.parametrize("case", FACTS["single"], ids=lambda case: case["name"])
def test_digests_of_one_dataset(corpora, capsys, case):
    found = json.loads(said(capsys, corpora[case["corpus"]], *options(case)))
    assert {name: found[name] for name in case["expected"]} == case["expected"]


@pytest.mark.parametrize("case", FACTS["blend"], ids=lambda case: case["name"])
def test_digests_of_a_blend(corpora, capsys, case):
    words = [str(word) for pair in zip(case["weights"], case["corpora"], strict=True) for word in pair]
    words = [corpora.get(word, word) for word in words]
    found, expected = json.loads(said(capsys, *words, *options(case))), case["expected"]
    for name, value in expected.items():
        assert found[name] == value, name


def test_statistics_and_beginnings(corpora, capsys):
    out = said(capsys, corpora["a"], "--samples", "1")
    assert "15,163 tokens (uint16) in 500 sequences, 500 documents" in out
    assert "tokens of a sequence: 2 to" in out
    assert "  sequence 0: 46463 5439 4008" in out
