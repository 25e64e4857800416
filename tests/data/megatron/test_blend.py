"""Blends: whose turn it is, whatever the weights, is what Megatron-LM's own code gave and what a plain loop gives."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dtgpt.data.megatron import blend
from dtgpt.data.megatron.blend import (
    Blend,
    blend_order,
    blend_sizes,
    load_blend,
    load_each_once,
    normalised,
    parse_data_path,
)
from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter
from dtgpt.data.megatron.samples import SampleRequest, Samples, load_samples
from dtgpt.util.errors import UserError
from tests.data.megatron.test_samples import FIXTURES, INDICES, corpora, digest

__all__ = ["corpora"]  # a fixture

ROOT = Path(__file__).parents[3]


def load_case(corpora, case, cache=None, **change):
    case = {**case, **change}
    request = SampleRequest(*(case[name] for name in ("split", "which", "seq_length", "num_samples", "seed")), cache)
    return load_blend([corpora[name] for name in case["corpora"]], case["weights"], request)


@pytest.mark.parametrize("case", FIXTURES["blend"], ids=lambda case: case["name"])
def test_blends_are_those_of_megatron(corpora, tmp_path, case):
    expected = case["expected"]
    asked = blend_sizes(normalised(case["weights"]), case["num_samples"])[1]
    assert asked == [d["num_samples_requested"] for d in expected["datasets"]]
    for found in (load_case(corpora, case), load_case(corpora, case, tmp_path), load_case(corpora, case, tmp_path)):
        assert len(found) == expected["num_samples_built"]
        for dataset, wanted in zip(found.datasets, expected["datasets"], strict=True):
            assert len(dataset) == wanted["num_samples_built"]
            for name in INDICES:
                assert digest(getattr(dataset.index, name)) == wanted[f"{name}_sha256"]
        pairs = np.stack([found.dataset_index, found.dataset_sample_index], 1)
        assert found.dataset_index.dtype == np.int16 and found.dataset_sample_index.dtype == np.int64
        assert pairs[:200].tolist() == expected["pairs_first_200"] and digest(pairs) == expected["pairs_sha256"]
        windows = found.windows(range(expected["windows_hashed"])).numpy()
        assert digest(windows) == expected["windows_sha256"]
    backwards = found.windows(np.arange(expected["windows_hashed"])[::-1]).numpy()
    assert hashlib.sha256(backwards[::-1].tobytes()).hexdigest() == expected["windows_sha256"]
    assert found.windows([]).shape == (0, case["seq_length"] + 1)


def naive_order(weights, size, limits=None):
    counts, pairs = [0] * len(weights), []
    for t in range(size):
        best, chosen = None, None
        for i, weight in enumerate(weights):
            lag = weight * max(t, 1.0) - counts[i]
            if (limits is None or counts[i] < limits[i]) and (best is None or lag > best):
                best, chosen = lag, i
        pairs.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return pairs


def pairs_of(order):
    assert [a.dtype.name for a in order] == ["int16", "int64"]
    return list(zip(*(a.tolist() for a in order), strict=True))


def test_a_long_order_keeps_the_shares():
    weights = normalised([0.31, 0.07, 0.22, 0.4, 0.013])
    order, samples = blend_order(weights, 100_000)
    assert pairs_of((order[:3000], samples[:3000])) == naive_order(weights, 3000)
    counts = np.bincount(order)
    assert np.abs(counts - np.array(weights) * 100_000).max() < 2
    assert all((samples[order == i] == np.arange(n)).all() for i, n in enumerate(counts))


@pytest.fixture
def two(tmp_path):
    for name, lengths in (("a", [9] * 10), ("b", [5] * 50)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.extend(np.arange(sum(lengths)), lengths)
    return [IndexedDataset(tmp_path / name) for name in ("a", "b")]


def test_without_weights_all_samples_come_once(two, tmp_path):
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        whole = load_blend(two, None, SampleRequest("1", "train", 8, None, 3, cache))
        assert [len(d) for d in whole.datasets] == [11, 31] and len(whole) == 42
        pairs = zip(whole.dataset_index.tolist(), whole.dataset_sample_index.tolist(), strict=True)
        assert sorted(pairs) == [(i, k) for i, n in enumerate((11, 31)) for k in range(n)]
        few = load_blend(two, None, SampleRequest("1", "train", 8, 20, 3, cache))
        assert few.dataset_index.tolist() == [i for i, _ in naive_order(normalised([11, 31]), 20)]
        assert len(load_blend(two, None, SampleRequest("1", "train", 8, 1000, 3, cache))) == 42  # there are no more


def test_one_dataset_is_a_blend_only_with_a_weight(two):
    alone = load_blend(two[:1], None, SampleRequest("9,1", "train", 8, 40, 3))
    assert isinstance(alone, Samples) and len(alone) == len(
        load_samples(two[0], SampleRequest("9,1", "train", 8, 40, 3))
    )
    weighted = load_blend(two[:1], [2.0], SampleRequest("9,1", "train", 8, 40, 3))
    assert isinstance(weighted, Blend) and len(weighted) == 40
    separate = load_blend(two[:1], [2.0], SampleRequest(None, "valid", 8, 40, 3))  # one prefix for validation alone
    assert isinstance(separate, Samples) and set(separate.index.document_index.tolist()) == set(range(10))


def test_what_is_not_a_blend_is_refused(two):
    for weights, count, sentence in (
        ([1.0], 10, "1 weights are given for 2 datasets"),
        ([1.0, 1.0], None, "has no end of its own; give num_samples"),
        ([1.0, 0.0], 10, "the weights .1.0, 0.0. are not a blend; give 1 to 32766 positive numbers"),
        ([1.0, float("nan")], 10, "are not a blend"),
        ([1e308, 1e308], 10, r"the weights .1e\+308, 1e\+308. are not a blend"),
        ([1e-320, 1e300], 10, "the weights .1e-320, 1e.300. are not a blend"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_blend(two, weights, SampleRequest("1", "train", 8, count, 3))
    datasets = load_blend(two, None, SampleRequest("1", "train", 8, None, 3)).datasets
    with pytest.raises(UserError, match=r"takes 12 samples of .*/a, which has 11 ready; ask for more samples, or"):
        Blend(datasets, np.zeros(12, np.int16), np.arange(12))
    with pytest.raises(IndexError):
        load_blend(two, [1, 1], SampleRequest("1", "train", 8, 10, 3)).windows([10])


def test_no_samples_of_a_blend_are_not_all_of_them(two, tmp_path):
    sizes, cache = [3, 5], tmp_path / "cache"
    for size, count in ((None, 8), (0, 0), (None, 8), (0, 0)):
        assert len(blend._load_order(sizes, size, cache)[0]) == count


def test_a_dataset_without_a_whole_sample_is_named(two):
    with pytest.raises(UserError, match=r"the train part of .*/a under the split 9,1 is shorter than one sample of 83"):
        load_blend(two, None, SampleRequest("9,1", "train", 82, None, 3))
    with pytest.raises(UserError, match=r"the valid part of .*/a under the split 99,1 has 0 documents .* or none"):
        load_blend(two, None, SampleRequest("99,1", "valid", 8, None, 3))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["0.3", "a", "7 ", " b"], (["a", "b"], [0.3, 7.0])),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["1", "2", "3"], (["1", "2", "3"], None)),  # an odd number: prefixes
    ],
)
def test_the_data_path_is_read_as_megatron_reads_it(given, expected):
    assert parse_data_path(given) == expected


@pytest.mark.parametrize(
    ("given", "sentence"), [([], "no dataset is given"), (["1", "a", "b", "c"], "'b' is not a weight of a dataset")]
)
def test_other_data_paths_are_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_data_path(given)


@pytest.mark.parametrize(
    ("arguments", "arrays"), [(["--documents", "500"], 3), (["--samples", "3000", "--blend", "3"], 2)]
)
def test_the_benchmark_measures(monkeypatch, capsys, arguments, arrays):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import index_build

    monkeypatch.setattr(sys, "argv", ["index_build.py", *arguments, "--only", "ours"])
    index_build.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seconds"] > 0 and result["peak"] > 0 and len(result["arrays"]) == arrays


@pytest.mark.parametrize("weights", [[0.3, 0.7], [0.9, 0.1], None, [1.0]])
def test_no_window_is_evaluated_twice(tmp_path, weights):
    """A dataset that has no more leaves the rest to the others."""
    sizes = [22, 90][: len(weights or [0, 0])]
    datasets = []
    for i, size in enumerate(sizes):
        with IndexedWriter(tmp_path / str(i), np.int32) as writer:
            writer.append(1000 * i + np.arange(4 * size + 1))
        datasets.append(IndexedDataset(tmp_path / str(i)))
    every = load_each_once(datasets, weights, SampleRequest(None, "valid", 4, 512, 1, tmp_path / "cache")).windows(
        range(sum(sizes))
    )
    assert len(set(every[:, 0].tolist())) == sum(sizes)
    few = load_each_once(datasets, weights, SampleRequest(None, "valid", 4, 20, 1))
    assert torch.equal(few.windows(range(20)), every[:20])
    as_megatron = load_blend(datasets, weights, SampleRequest(None, "valid", 4, 20, 1))  # asks for an epoch at most
    assert torch.equal(few.windows(range(20)), as_megatron.windows(range(20)))


def test_a_part_shorter_than_a_window_is_one_window(tmp_path):
    with IndexedWriter(tmp_path / "a", np.int32) as writer:
        writer.append([1, 2, 3])
    found = load_each_once([IndexedDataset(tmp_path / "a")], None, SampleRequest(None, "valid", 8, 512, 1))
    assert found.windows(range(len(found))).tolist() == [[1, 2, 3] * 3]
