"""Which tokens are sample k: held against what Megatron-LM's own code gave, and its rules written plainly."""

import hashlib
import json
import math
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dtgpt.data.cached.folders import cached_index
from dtgpt.data.megatron import samples
from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from dtgpt.data.megatron.samples import SampleRequest, build_sample_index, load_samples, split_fractions, split_range
from dtgpt.data.megatron.token_shards import TokenShards
from dtgpt.util.errors import UserError

ROOT = Path(__file__).parents[3]
FIXTURES = json.loads((ROOT / "tests" / "fixtures" / "megatron_samples.json").read_text())
INDICES = ("document_index", "sample_index", "shuffle_index")


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()


def make_corpus(prefix, seed, n_docs, lo, hi, vocab, **_):
    """Documents of random tokens, each with an EOD; how is told in the fixtures' notes."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, token_dtype(vocab)) as writer:
        for length in rng.integers(lo, hi, n_docs):
            writer.append(np.concatenate([rng.integers(0, vocab - 1, int(length)), [vocab - 1]]))
            writer.end_document()


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for name, corpus in FIXTURES["corpora"].items():
        make_corpus(folder / name, **corpus)
    return {name: IndexedDataset(folder / name) for name in FIXTURES["corpora"]}


def load_case(corpora, case, cache=None):
    names = ("split", "which", "seq_length", "num_samples", "seed")
    return load_samples(corpora[case["corpus"]], SampleRequest(*(case[name] for name in names), cache))


@pytest.mark.parametrize("name", FIXTURES["corpora"])
def test_files_are_those_of_megatron(corpora, name):
    expected, prefix = FIXTURES["corpora"][name], corpora[name].prefix
    assert hashlib.sha256(bin_path(prefix).read_bytes()).hexdigest() == expected["bin_sha256"]
    assert hashlib.sha256(idx_path(prefix).read_bytes()).hexdigest() == expected["idx_sha256"]
    assert corpora[name].num_tokens == expected["tokens"] and corpora[name].dtype == expected["dtype"]


@pytest.mark.parametrize("case", FIXTURES["single"], ids=lambda case: case["name"])
def test_samples_are_those_of_megatron(corpora, tmp_path, case):
    expected = case["expected"]
    documents = split_range(case["split"], case["which"], len(corpora[case["corpus"]]))
    assert [documents.start, documents.stop] == expected["document_range"]
    for found in (load_case(corpora, case), load_case(corpora, case, tmp_path), load_case(corpora, case, tmp_path)):
        assert len(found) == expected["num_samples_built"]
        assert found.index.sample_index[:4].tolist() == expected["sample_index_first_4_rows"]
        for name in INDICES:
            assert digest(getattr(found.index, name)) == expected[f"{name}_sha256"], name
        windows = found.windows(range(expected["windows_hashed"])).numpy()
        assert windows.dtype == np.int64 and windows.shape == (expected["windows_hashed"], case["seq_length"] + 1)
        assert digest(windows) == expected["windows_sha256"]
        assert windows[:3, :8].tolist() == expected["first_3_windows_first_8_tokens"]


def test_a_document_may_be_longer_than_32_bits():
    """Shards without an end-of-text token are one sequence a file."""
    lengths = np.array([2**31 + 7, 5], np.int64)
    index = build_sample_index(lengths, range(2), 2**28, None, 3)
    first = int(lengths[index.document_index[0]])
    assert index.sample_index.dtype == np.int64 and len(index) == 8
    tokens = [k * 2**28 for k in range(1, 9)]
    assert index.sample_index[1:].tolist() == [[int(t >= first), t - (first if t >= first else 0)] for t in tokens]


def test_splits_are_read_as_megatron_reads_them():
    assert split_fractions("949,50,1") == [(0.0, 0.949), (0.949, 0.999), (0.999, 1.0)]
    assert split_fractions("100,0,0") == [(0.0, 1.0), None, None]
    assert split_fractions("7") == split_fractions("1/0") == [(0.0, 1.0), None, None]
    assert split_fractions(".5/.25, .25") == [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)]
    assert split_fractions("0,1,1")[0] is None
    assert split_range("1,1", "train", 5) == range(2) and split_range("1,1", "valid", 5) == range(2, 5)
    assert split_range("1,1", "train", 7) == range(4)  # 3.5 is rounded to even
    assert split_range("1,1", "test", 7) == range(0) and split_range(None, "test", 7) == range(7)


@pytest.mark.parametrize("split", ["", "a", "1,1,1,1", "0,0", "1.2.3", "90,-10", "9e2,1", "9" * 400])
def test_other_splits_are_refused(split):
    with pytest.raises(UserError, match=r"is not one to three weights, such as 949,50,1"):
        split_fractions(split)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"seq_length": 1}, "seq_length=1 is too short"), ({"seed": -1}, "seed=-1 is not a seed"),
    ({"seed": 2**32}, "is not a seed of NumPy's RandomState; use one from 0 to 4294967295"),
    ({"num_samples": -1}, "num_samples=-1 is negative"),
    ({"documents": range(2, 2)}, "this part of the dataset has 0 documents with 0 tokens, too few .* more weight"),
    ({"documents": range(2)}, "has 2 documents with 1 token, too few"),
    ({"num_samples": 10**13}, "takes [1-9][0-9,]{18,} bytes while its index is built, .* ask for fewer samples")
])  # fmt: skip
def test_what_has_no_samples_is_refused(change, sentence):
    given = {"documents": range(4), "seq_length": 2, "num_samples": 3, "seed": 0} | change
    with pytest.raises(UserError, match=sentence):
        build_sample_index(np.array([0, 1, 5, 5], np.int32), **given)
    with pytest.raises(UserError, match="no part 'dev' of a dataset; use one of train, valid, test"):
        split_range("1", "dev", 4)


@pytest.mark.parametrize("wrong", [[-1], [0, 10**9]])
def test_there_are_no_other_samples(corpora, wrong):
    with pytest.raises(IndexError):
        load_case(corpora, FIXTURES["single"][0]).windows(wrong)


def test_a_corpus_without_a_whole_window_has_no_samples():
    index = build_sample_index(np.array([3], np.int32), range(1), 8, None, 0)
    assert len(index) == 0 and index.sample_index.tolist() == [[0, 0]]
    assert len(build_sample_index(np.array([3], np.int32), range(1), 8, 2, 0)) == 2  # six epochs


def test_shards_have_samples(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(40, dtype="<u2").tobytes())
    (tmp_path / "b.bin").write_bytes(np.arange(40, 90, dtype="<u2").tobytes())
    found = load_samples(
        TokenShards([tmp_path / "a.bin", tmp_path / "b.bin"], 20), SampleRequest(None, "train", 8, None, 1)
    )
    windows = found.windows(np.argsort(found.index.shuffle_index)).numpy()
    stream = [windows[0, 0], *windows[:, 1:].flatten()]
    assert len(found) == 11 and len(set(stream)) == 89 and found.sequences.lengths.tolist() == [21, 19, 50]


def test_the_cache_goes_by_content(corpora, tmp_path, monkeypatch):
    case = FIXTURES["single"][0]
    load_case(corpora, case, tmp_path / "cache")
    monkeypatch.setattr(samples, "build_sample_index", None)  # nothing is built any more
    prefix = corpora["a"].prefix
    for path in (bin_path, idx_path):
        shutil.copy(path(prefix), path(tmp_path / "elsewhere"))
    moved = load_case({"a": IndexedDataset(tmp_path / "elsewhere")}, case, tmp_path / "cache")
    assert digest(moved.index.shuffle_index) == case["expected"]["shuffle_index_sha256"]
    for change in ({"seed": 0}, {"seq_length": 33}, {"num_samples": None}, {"which": "valid"}, {"corpus": "b"}):
        with pytest.raises(TypeError):
            load_case(corpora, case | change, tmp_path / "cache")


DAMAGE = {
    "cut": lambda folder: (folder / "shuffle.npy").write_bytes((folder / "shuffle.npy").read_bytes()[:-1]),
    "flipped": lambda folder: (folder / "sample.npy").write_bytes((folder / "sample.npy").read_bytes()[:-1] + b"\xff"),
    "lost": lambda folder: (folder / "document.npy").unlink(),
    "empty": lambda folder: (folder / "document.npy").write_bytes(b""),
    "no list": lambda folder: (folder / "contents.json").unlink(),
    "other list": lambda folder: (folder / "contents.json").write_text("[1]"),
    "no text": lambda folder: (folder / "contents.json").write_bytes(b"\xff"),
    "empty list": lambda folder: (folder / "contents.json").write_text("{}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_cache_is_built_again(corpora, tmp_path, name, capsys):
    case = FIXTURES["single"][0]
    load_case(corpora, case, tmp_path)
    (folder,) = tmp_path.iterdir()
    DAMAGE[name](folder)
    for told in (True, False):
        found = load_case(corpora, case, tmp_path)
        for index in INDICES:
            assert digest(getattr(found.index, index)) == case["expected"][f"{index}_sha256"]
        assert (f"{folder} is damaged (" in capsys.readouterr().err) == told
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", ["document", "sample", "shuffle"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_cached_index_that_shrinks_while_it_is_read_is_named(corpora, tmp_path, name, keep):
    """It is neither read as zeros nor ends the process."""
    found = load_case(corpora, FIXTURES["single"][0], tmp_path)
    path = next(tmp_path.glob(f"index-*/{name}.npy"))
    os.truncate(path, int(keep * path.stat().st_size))
    with pytest.raises(
        UserError, match=rf"{name}.npy had \d+ bytes when it was opened, .*; start again: it is made anew"
    ):
        found.windows(range(len(found)))
    assert len(load_case(corpora, FIXTURES["single"][0], tmp_path).windows(range(len(found)))) == len(found)


def test_a_cache_that_cannot_be_written_is_told(corpora, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot be cached in .*file.*; make it writable, or set DTGPT_CACHE to another"
    ):
        load_case(corpora, FIXTURES["single"][0], tmp_path / "file")


def build_at_once(cache, barrier, results):
    barrier.wait()
    arrays = cached_index(cache, {"kind": "test"}, lambda: {"a": np.arange(1 << 18)})
    results.put(int(np.sum(arrays["a"])))


def test_several_processes_may_build_at_once(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(4), fork.Queue()
    workers = [fork.Process(target=build_at_once, args=(tmp_path, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=120) for _ in workers] == [math.comb(1 << 18, 2)] * 4
    for worker in workers:
        worker.join()
    assert len(list(tmp_path.iterdir())) == 1
