"""What holds for any documents, lengths, seeds, splits and weights, searched for counterexamples by hypothesis."""

import tempfile
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.data.megatron import indexed, samples, token_shards
from dtgpt.data.megatron.blend import Blend, blend_order, blend_sizes, load_blend, normalised
from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, merge
from dtgpt.data.megatron.samples import SPLITS, SampleRequest, build_sample_index, load_samples, split_range
from dtgpt.data.megatron.token_shards import TokenShards
from tests.data.megatron.test_blend import naive_order, pairs_of
from tests.data.megatron.test_indexed import same, write
from tests.data.megatron.test_samples import INDICES

pytestmark = pytest.mark.slow(4)

quick = settings(deadline=None, max_examples=40)
SEEDS = st.sampled_from([0, 1234, 2**32 - 1]) | st.integers(0, 2**32 - 1)
BLOCKS = st.sampled_from([1, 3, 1 << 15])
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1)


@contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@st.composite
def typed_documents(draw, dtypes=("<u2", "<i4", "<i8", "u1", "<i2", "i1")):
    """(documents as lists of sequences, dtype): with empty ones of both kinds, and all ids that the type holds."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    limits = np.iinfo(dtype)
    sequence = st.lists(st.integers(int(limits.min), int(limits.max)), max_size=12)
    return draw(st.lists(st.lists(sequence, max_size=4), max_size=10)), dtype


@quick
@given(typed_documents(), BLOCKS)
def test_any_documents_survive(documents, block):
    documents, dtype = documents
    with folder() as path, patch.object(indexed, "BLOCK", block):
        dataset = IndexedDataset(write(path / "a", documents, dtype))
        assert dataset.dtype == dtype
        same(dataset, documents)


@quick
@given(st.lists(typed_documents(("<u2",)), min_size=1, max_size=4), BLOCKS)
def test_joined_datasets_are_those_written_at_once(parts, block):
    parts = [documents for documents, _ in parts]
    with folder() as path, patch.object(indexed, "BLOCK", block):
        merge([write(path / str(i), part) for i, part in enumerate(parts)], path / "joined")
        write(path / "once", [document for part in parts for document in part])
        for name in (bin_path, idx_path):
            assert name(path / "joined").read_bytes() == name(path / "once").read_bytes()


@quick
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=3), BLOCKS)
def test_sequences_of_shards_are_cut_at_the_end_of_text_and_nowhere_else(shards, block):
    with folder() as path, patch.object(token_shards, "SCAN", block):
        paths = [path / f"{i}.bin" for i in range(len(shards))]
        for name, tokens in zip(paths, shards, strict=True):
            name.write_bytes(np.array(tokens, "<u2").tobytes())
        dataset = TokenShards(paths, 5)
        sequences = [dataset.window(i).tolist() for i in range(len(dataset))]
        everything = np.arange(len(dataset))
        read = dataset.read(everything, 0 * everything, dataset.lengths.astype(np.int64)).tolist()
    assert [*chain(*sequences)] == [*chain(*shards)] == read
    assert all(sequence and 5 not in sequence[:-1] for sequence in sequences)
    assert sum(sequence[-1] == 5 for sequence in sequences) == sum(tokens.count(5) for tokens in shards)


@quick
@given(typed_documents(("<u2", "<i4")), st.data())
def test_pieces_are_read_alone_and_together(documents, data):
    documents, dtype = documents
    sequences = [s for document in documents for s in document] or [[1]]
    pieces = []
    for _ in range(data.draw(st.integers(1, 8))):
        i = data.draw(st.integers(0, len(sequences) - 1))
        begin = data.draw(st.integers(0, len(sequences[i])))
        pieces.append((i, begin, data.draw(st.integers(0, len(sequences[i]) - begin))))
    expected = [sequences[i][begin : begin + count] for i, begin, count in pieces]
    with folder() as path:
        dataset = IndexedDataset(write(path / "a", [sequences], dtype))
        assert dataset.read(*np.array(pieces).T).tolist() == [*chain(*expected)]
        assert [dataset.window(*piece).tolist() for piece in pieces] == expected


def naive_indices(lengths, documents, seq_length, num_samples, seed):
    """The rules one by one: epochs, the 80 % rule, shuffles, and a walk through the documents."""
    per_epoch = sum(lengths[d] for d in documents)
    epochs = 1
    while num_samples is not None and epochs * per_epoch < num_samples * seq_length + 1:
        epochs += 1
    before = ((epochs - 1) * per_epoch - 1) // seq_length
    apart = epochs > 1 and num_samples - before < int(0.80 * ((per_epoch - 1) // seq_length))
    rng, order = np.random.RandomState(seed), []
    for count in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(documents) * count, np.int32)
        rng.shuffle(part)
        order += part.tolist()
    owners = [(p, t) for p, d in enumerate(order) for t in range(lengths[d])]  # of every token of the stream
    rows = [(0, 0), *owners[seq_length::seq_length]]
    shuffles = []
    for numbers in [range(before), range(before, len(rows) - 1)] if apart else [range(len(rows) - 1)]:
        part = np.array(numbers, np.uint32)
        rng.shuffle(part)
        shuffles += part.tolist()
    return order, rows, shuffles


@settings(quick, max_examples=120)
@given(LENGTHS, st.data(), st.sampled_from([2, 3, 8, 50, 300]), SEEDS, BLOCKS)
def test_any_index_follows_the_rules(lengths, data, seq_length, seed, block):
    first = data.draw(st.integers(0, len(lengths) - 1))
    documents = range(first, data.draw(st.integers(first + 1, len(lengths))))
    if sum(lengths[d] for d in documents) < 2:
        documents = range(len(lengths))
    wanted = data.draw(st.none() | st.integers(0, 3 * sum(lengths) // seq_length + 2))
    with patch.object(samples, "BLOCK", block):
        index = build_sample_index(np.array(lengths, np.int32), documents, seq_length, wanted, seed)
    order, rows, shuffles = naive_indices(lengths, documents, seq_length, wanted, seed)
    assert index.document_index.tolist() == order
    assert index.sample_index.tolist() == [list(row) for row in rows]
    assert index.shuffle_index.tolist() == shuffles
    assert [getattr(index, name).dtype.name for name in INDICES] == ["int32", "int32", "uint32"]
    assert wanted is None or len(index) >= wanted


def numbered(path, lengths, dtype=np.uint16, first=0):
    """A dataset in which every token is another number."""
    with IndexedWriter(path, dtype) as writer:
        writer.extend(np.arange(first, first + sum(lengths)), lengths)
    return IndexedDataset(path)


@quick
@given(LENGTHS, st.sampled_from([np.uint16, np.int32]), st.integers(2, 12), st.integers(1, 4), SEEDS)
def test_every_token_comes_once_an_epoch(lengths, dtype, seq_length, epochs, seed):
    """The stream of all windows is every document once an epoch, but for the end that fills no window."""
    total = sum(lengths)
    wanted = (epochs * total - 1) // seq_length
    with folder() as path:
        found = load_samples(
            numbered(path / "a", lengths, dtype), SampleRequest(None, "train", seq_length, wanted, seed)
        )
        assert len(found) == max(wanted, (total - 1) // seq_length) and sorted(found.index.shuffle_index) == [
            *range(len(found))
        ]
        if not len(found):
            return
        windows = found.windows(np.argsort(found.index.shuffle_index)).numpy()  # back in the order of the stream
    assert (windows[1:, 0] == windows[:-1, -1]).all()
    stream = [windows[0, 0], *windows[:, 1:].flatten()]
    left = epochs * total - len(stream)
    counts = np.bincount(stream, minlength=total)
    assert 0 <= left < seq_length and (counts <= epochs).all() and (epochs - counts).sum() == left


@quick
@given(st.lists(st.sampled_from(["0", "1", ".5", "33.3", "949", "0.0001"]), min_size=1, max_size=3),
       st.integers(0, 10**7))  # fmt: skip
def test_a_split_loses_no_document_and_uses_none_twice(weights, size):
    if not sum(map(float, weights)):
        return
    parts = [split_range(",".join(weights), which, size) for which in SPLITS]
    bounds = [0, *(bound for part in parts if part for bound in (part.start, part.stop)), size]
    assert all(a == b for a, b in list(pairwise(bounds))[::2]) and sum(map(len, parts)) == size
    assert all(not part for part, weight in zip(parts, map(float, [*weights, 0, 0]), strict=False) if not weight)


# Ties, thirds, and shares so small that their turn hardly comes.
WEIGHTS = st.integers(1, 20).flatmap(
    lambda count: st.one_of(
        st.just([1.0] * count),
        *(st.lists(values, min_size=count, max_size=count) for values in (
            st.integers(1, 6).map(float), st.floats(1e-9, 1.0), st.integers(0, 8).map(lambda power: 10.0**-power),
        )),
    )
)  # fmt: skip


@quick
@given(WEIGHTS, st.sampled_from([0, 1, 2, 77, 1024, 3000]))
def test_any_order_of_a_blend_is_that_of_the_plain_loop(weights, size):
    weights = normalised(weights)
    assert pairs_of(blend_order(weights, size)) == naive_order(weights, size)


@quick
@given(st.lists(st.sampled_from([1, 3, 50]) | st.integers(1, 600), min_size=1, max_size=9))
def test_any_exhaustive_order_is_that_of_the_plain_loop(sizes):
    order = pairs_of(blend_order(normalised(sizes), sum(sizes), sizes))
    assert order == naive_order([size / sum(sizes) for size in sizes], sum(sizes), sizes)
    assert sorted(order) == [(i, k) for i, size in enumerate(sizes) for k in range(size)]


@quick
@given(st.lists(st.tuples(LENGTHS, st.floats(0.01, 1.0)), min_size=2, max_size=4), st.integers(0, 60), SEEDS)
def test_a_blend_takes_the_samples_of_each_dataset_in_their_order(datasets, count, seed):
    with folder() as path:
        opened = [numbered(path / str(i), lengths, first=1000 * i) for i, (lengths, _) in enumerate(datasets)]
        weights = [weight for _, weight in datasets]
        found = load_blend(opened, weights, SampleRequest(None, "train", 4, count, seed, path / "cache"))
        assert isinstance(found, Blend) and count <= len(found) <= count + len(datasets)
        taken, asked = blend_sizes(normalised(weights), count)
        windows = found.windows(np.arange(len(found))).numpy()
        for i, (sequences, wanted) in enumerate(zip(opened, asked, strict=True)):
            mine = found.dataset_index[:] == i
            assert abs(int(mine.sum()) - taken[i]) <= len(datasets)
            alone = load_samples(sequences, SampleRequest(None, "train", 4, wanted, seed))
            assert (windows[mine] == alone.windows(np.arange(mine.sum())).numpy()).all()
            assert (windows[mine] // 1000 == i).all()
