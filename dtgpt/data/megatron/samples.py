"""Which tokens are sample k: the windows of Megatron-LM's GPTDataset, in its order.

The documents of a split are repeated for as many epochs as the samples need, shuffled, and laid end to end. Window j is
tokens j T to j T + T of that stream, and sample k is window `shuffle_index[k]`. Where little of the last epoch is
needed, it is shuffled apart, so that every document is seen about as often as the others. Every value, its type and the
order in which random numbers are drawn are those of Megatron-LM (megatron/core/datasets/gpt_dataset.py and helpers.cpp,
state of August 2026); the sample index is computed here from cumulated lengths, not by walking documents.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dtgpt.data.cached.file_array import Array, check_memory
from dtgpt.data.cached.folders import cached_index
from dtgpt.data.megatron.token_shards import TokenSequences
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Given, Is, Rule, Rules, check_rules

SPLITS = ("train", "valid", "test")
JOINT = 0.80  # fraction of an epoch from which on the last one is shuffled with the others
BLOCK = 1 << 15  # documents at a time: their lengths and sums stay in the processor's cache
INT32_MAX = np.iinfo(np.int32).max
SEEDS = range(2**32)
INDEX_RULES: Rules = (  # of what an index is built for
    Rule("seq_length={seq_length} is too short for samples; use 2 or more", Is("seq_length", "<", 2)),
    Rule(
        f"seed={{seed}} is not a seed of NumPy's RandomState; use one from 0 to {SEEDS[-1]}",
        Is("seed", "not in", SEEDS),
    ),
    Rule(
        "num_samples={num_samples} is negative; use 0 or more, or none for one epoch",
        Given("num_samples"),
        Is("num_samples", "<", 0),
    ),
    Rule(
        "{sequences} documents are too many for one dataset; split it, and blend the parts",
        Is("sequences", ">", INT32_MAX),
    ),
)


@dataclass(frozen=True)
class SampleRequest:
    """Which samples to load. split: relative sizes of the parts; None: the data are for `which` (train, valid or test)
    alone. seq_length: tokens of a sample, without its last target. num_samples: None for one epoch. cache: folder that
    keeps indices; None: nothing is kept."""

    split: str | None
    which: str
    seq_length: int
    num_samples: int | None
    seed: int
    cache: Path | None = None

    def name(self, sequences: TokenSequences) -> str:
        """Return what messages call the part of these sequences."""
        under = "" if self.split is None else f" under the split {self.split}"
        return f"the {self.which} part of {sequences.name}{under}"


@dataclass(frozen=True)
class SampleIndex:
    """`document_index` int32 [epochs x documents]; `sample_index` int32 or int64 [N + 1, 2]: (position in it, token of
    that document) at which each window begins; `shuffle_index` uint32 or int64 [N]: the window of each sample.
    Row j + 1 ends window j."""

    seq_length: int
    document_index: Array
    sample_index: Array
    shuffle_index: Array

    def __len__(self) -> int:
        return len(self.shuffle_index)


@dataclass(frozen=True)
class Epochs:
    """How often the documents are repeated; `samples_apart`: the windows before a last epoch that is shuffled apart."""

    count: int
    samples_apart: int | None


def split_fractions(split: str) -> list[tuple[float, float] | None]:
    """Return where training, validation and test begin and end, as fractions of the documents; None for an empty part.
    `split` is up to three weights, such as "949,50,1". Raises UserError."""
    wrong = f"the split {shown(split)} is not one to three weights, such as 949,50,1"
    try:
        weights = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError:
        raise UserError(wrong) from None
    if not 1 <= len(weights) <= len(SPLITS) or re.search(r"[^\s.0-9,/;:]", split) or not 0 < sum(weights) < np.inf:
        raise UserError(wrong)
    weights += [0.0] * (len(SPLITS) - len(weights))
    bounds = np.cumsum([0.0, *np.array(weights) / np.sum(weights)]).tolist()
    return [(a, b) if a < b else None for a, b in pairwise(bounds)]


def split_range(split: str | None, which: str, num_sequences: int) -> range:
    """Return the sequences of `which` (train, valid or test), none if it has no weight; all if `split` is None. Raises
    UserError."""
    if which not in SPLITS:
        raise UserError(f"there is no part {shown(which)} of a dataset; use one of {', '.join(SPLITS)}")
    fractions = (0.0, 1.0) if split is None else split_fractions(split)[SPLITS.index(which)]
    return range(*(round(f * float(num_sequences)) for f in fractions)) if fractions else range(0)


def count_tokens(sequences: TokenSequences, split: str | None, which: str) -> int:
    """Return the number of tokens in a part. Raises UserError as `split_range` does."""
    part = split_range(split, which, len(sequences))
    return int(sequences.lengths[part.start : part.stop].sum(dtype=np.int64))


def count_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> Epochs:
    """Return the fewest epochs with `num_samples` windows (None: one epoch)."""
    if num_samples is None:
        return Epochs(1, None)
    count = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    if count == 1:
        return Epochs(1, None)
    before = ((count - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    apart = num_samples - before < int(JOINT * per_epoch)
    return Epochs(count, before if apart else None)


def build_sample_index(
    lengths: Array,
    documents: range,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    part: str = "this part of the dataset",
) -> SampleIndex:
    """Return at least `num_samples` windows (None: one epoch) of `seq_length` + 1 tokens. lengths `[S]`: tokens of
    every sequence. documents: those to draw from. part: what an error calls these documents. Raises UserError."""
    asked = {"seq_length": seq_length, "seed": seed, "num_samples": num_samples, "sequences": len(lengths)}
    check_rules(INDEX_RULES, asked)
    local = lengths[documents.start : documents.stop]
    tokens = int(local.sum(dtype=np.int64))
    if tokens < 2:
        raise UserError(
            f"{part} has {counted(len(documents), 'document')} with {counted(tokens, 'token')}, too few to draw "
            "samples from; add documents, or give the part more weight in the split, or none if it is not for training"
        )
    epochs = count_epochs(tokens, seq_length, num_samples)
    count = (epochs.count * tokens - 1) // seq_length
    check_memory(epochs.count * len(documents) * (4 + 8) + count * (8 + 4 + 8), f"{part} with {count:,} samples")
    rng = np.random.RandomState(seed)
    last = 0 if epochs.samples_apart is None else 1
    parts = [_shuffled(documents, n, np.int32, rng) for n in (epochs.count - last, last) if n]
    document_index = _joined(parts)
    wide = max(len(document_index), int(np.max(lengths))) > INT32_MAX
    rows = np.zeros((count + 1, 2), np.int64 if wide else np.int32)
    _fill_rows(rows, local, document_index, documents.start, seq_length)
    del local
    return SampleIndex(seq_length, document_index, rows, _shuffle_index(count, epochs.samples_apart, rng))


def sequential_index(lengths: Array, seq_length: int, batch: int, part: str) -> SampleIndex:
    """Return the windows of consecutive tokens, file after file, of which each is cut after its last whole batch.

    lengths `[S]`: tokens of every file. batch: samples. A file of L tokens has as many batches of B tokens as begin
    before token L - B - 1, which are those of modded-nanogpt's loader. part: what an error calls the files. Raises
    UserError where no file has a batch.
    """
    tokens = batch * seq_length
    windows = np.maximum(-(-(np.asarray(lengths, np.int64) - tokens - 1) // tokens), 0) * batch
    total = int(windows.sum())
    if total == 0:
        raise UserError(f"{part} has no file of more than {counted(tokens + 1, 'token')}, a batch; use a smaller batch")
    files = np.repeat(np.arange(len(lengths)), windows)
    begins = (np.arange(total) - np.repeat(np.cumsum(windows) - windows, windows)) * seq_length
    rows = np.stack([files, begins, files, begins + seq_length], axis=1).reshape(-1, 2)  # of each window both ends
    return SampleIndex(seq_length, np.arange(len(lengths), dtype=np.int32), rows, np.arange(0, 2 * total, 2))


def _shuffled(values: range, repeats: int, dtype: type, rng: np.random.RandomState) -> np.ndarray:
    """Shuffle as 64 bits, for which NumPy has a faster loop; the permutation does not depend on the type."""
    wide = np.tile(np.arange(values.start, values.stop), repeats)
    rng.shuffle(wide)
    return wide.astype(dtype)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _shuffle_index(count: int, apart: int | None, rng: np.random.RandomState) -> np.ndarray:
    dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [range(count)] if apart is None or apart == count else [range(apart), range(apart, count)]
    return _joined([_shuffled(part, 1, dtype, rng) for part in parts])


def _fill_rows(rows: np.ndarray, lengths: np.ndarray, document_index: np.ndarray, first: int, seq_length: int) -> None:
    """Fill row k > 0 with the place of token k T of the stream: the last token of window k - 1, the first of window k.
    Row 0 is (0, 0), even if document 0 is empty. `lengths` are those of the documents from `first` on."""
    count, row, end = len(rows), 1, 0
    for begin in range(0, len(document_index), BLOCK):
        documents = document_index[begin : begin + BLOCK]
        sizes = lengths.take(documents.astype(np.int64) - first)  # several times faster than indexing with int32
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += end
        stops = (ends + (seq_length - 1)) // seq_length  # rows whose token lies before the end of the document
        np.clip(stops, 1, count, out=stops)
        counts = stops.copy()
        counts[0] -= row
        counts[1:] -= stops[:-1]
        places = np.flatnonzero(counts)
        if len(places) and counts.max() > 1:
            places = np.repeat(places, counts[places])
        stop = row + len(places)
        rows[row:stop, 0] = places + begin
        rows[row:stop, 1] = np.arange(row, stop) * seq_length - (ends - sizes)[places]
        row, end = stop, int(ends[-1])


class Samples:
    """The samples of one dataset, by number."""

    def __init__(self, sequences: TokenSequences, index: SampleIndex):
        self.sequences, self.index = sequences, index
        self.datasets = [self]  # as a blend has several

    def __len__(self) -> int:
        return len(self.index)

    def windows(self, samples: ArrayLike) -> Tensor:
        """Return the tokens int64 [B, T + 1] of the samples `samples [B]`, on the CPU. Raises IndexError."""
        samples = check_samples(samples, len(self))
        index = self.index
        windows = index.shuffle_index[samples].astype(np.int64)
        begin, end = (index.sample_index[rows].astype(np.int64) for rows in (windows, windows + 1))
        spans = end[:, 0] - begin[:, 0] + 1  # documents that each window touches
        stop = np.cumsum(spans)
        places = np.repeat(begin[:, 0] - (stop - spans), spans) + np.arange(spans.sum())
        sequences = index.document_index[places]
        begins, ends = np.zeros(len(places), np.int64), self.sequences.lengths[sequences].astype(np.int64)
        begins[stop - spans] = begin[:, 1]
        ends[stop - 1] = end[:, 1] + 1
        tokens = self.sequences.read(sequences, begins, ends - begins).astype(np.int64)
        return torch.from_numpy(tokens.reshape(len(samples), index.seq_length + 1))


def check_samples(samples: ArrayLike, count: int) -> np.ndarray:
    """Return the numbers as int64 [B]. Raises IndexError if there is no such sample."""
    samples = np.asarray(samples, dtype=np.int64).reshape(-1)
    if samples.size and (samples.min() < 0 or samples.max() >= count):
        raise IndexError(f"samples {samples.min()} to {samples.max()} of {count}")
    return samples


def load_samples(sequences: TokenSequences, request: SampleRequest) -> Samples:
    """Return the samples that are asked for, with their index from the cache. One process of a machine calls this
    first, then all others. Raises UserError."""
    documents = split_range(request.split, request.which, len(sequences))
    asked = request.seq_length, request.num_samples, request.seed

    def build() -> dict[str, np.ndarray]:
        index = build_sample_index(sequences.lengths, documents, *asked, request.name(sequences))
        return {name: np.asarray(getattr(index, f"{name}_index")) for name in ("document", "sample", "shuffle")}

    settings = {
        "kind": "samples",
        "sequences": sequences.digest,
        "documents": [documents.start, documents.stop],
        "seq_length": request.seq_length,
        "num_samples": request.num_samples,
        "seed": request.seed,
    }
    arrays = cached_index(request.cache, settings, build)
    index = SampleIndex(request.seq_length, arrays["document"], arrays["sample"], arrays["shuffle"])
    return Samples(sequences, index)
