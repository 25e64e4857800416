"""Training on token files: those of `dtgpt prepare` and Megatron-LM, and shards of llm.c and nanoGPT.

Sample i of a run is sample i of Megatron-LM's GPTDataset, or of its blend, for the same seed, split, sequence length
and number of samples (`dtgpt.data.megatron.samples`, `blend`).
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from functools import cached_property
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.dataset import Dataset, Part, check_vocabulary, warn_of_unused_rows
from dtgpt.data.megatron.blend import Blend, load_blend, load_each_once, parse_data_path
from dtgpt.data.megatron.indexed import IndexedDataset, bin_path, idx_path
from dtgpt.data.megatron.samples import SPLITS, Samples, split_fractions, split_range
from dtgpt.data.megatron.token_shards import TokenSequences, TokenShards
from dtgpt.data.megatron.tokenizer_beside import tokenizer_of
from dtgpt.data.text import SUFFIXES
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown

if TYPE_CHECKING:
    from dtgpt.config.sections import DataConfig

PROBED = 256  # samples of each part that are looked at before a run begins


class PreparedDataset(Dataset):
    """Samples of a part for training, and of parts for validation and test, each None where there is none."""

    def __init__(
        self, tokenizer: Tokenizer, train: Samples | Blend, valid: Samples | Blend | None,
        test: Samples | Blend | None, source: str,
    ):  # fmt: skip
        self.tokenizer, self.train, self.valid, self.test, self.source = tokenizer, train, valid, test, source
        self.digest = _digest(tokenizer, train, valid)

    @cached_property
    def num_train_tokens(self) -> int:
        return _num_tokens(self.train)

    @cached_property
    def num_valid_tokens(self) -> int:
        return _num_tokens(self.valid) if self.valid else 0

    def windows(self, sample_ids: Tensor, seq_length: int, key: Tensor) -> Tensor:
        """A run that takes more samples than its order was built for begins the order again."""
        return self._known(self.train, sample_ids.numpy() % len(self.train))

    def held_out(self, part: Part, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
        samples = self.valid if part == "valid" else self.test
        if not samples:
            return
        count = min(len(samples), max_samples)
        for first in range(0, count, batch_size):
            yield self._known(samples, np.arange(first, min(first + batch_size, count)))

    def bytes_per_token(self) -> float:
        ids = torch.arange(min(PROBED, len(self.train)))
        tokens = self.windows(ids, 0, ids).flatten().numpy()
        counts = np.bincount(tokens, minlength=self.tokenizer.vocab_size)
        return float(counts @ self.tokenizer.token_bytes()) / len(tokens)

    def check(self, seq_length: int, vocab_size: int) -> None:
        check_vocabulary(self.tokenizer, vocab_size)
        warn_of_unused_rows(self.tokenizer, vocab_size)
        for samples in (self.train, self.valid, self.test):
            if samples:
                self._known(samples, np.arange(min(PROBED, len(samples))))

    def _known(self, samples: Samples | Blend, ids: np.ndarray) -> Tensor:
        """Windows of the samples `ids`. Raises UserError where the tokenizer does not know a token of them."""
        windows = samples.windows(ids)
        wrong = windows[(windows < 0) | (windows >= self.tokenizer.vocab_size)]
        if len(wrong):
            names = " or ".join(dict.fromkeys(part.sequences.name for part in samples.datasets))
            known, size = self.tokenizer, self.tokenizer.vocab_size
            owner, remedy = "tokenizer", "give the tokenizer that the data were prepared with"
            if not known.spells:
                owner, remedy = "model", f"give a larger --model.vocab_size: token {int(wrong.max())} is among them"
            raise UserError(f"{names} holds token {int(wrong[0])}, but the {owner} has {size} tokens; {remedy}")
        return windows


def is_prepared(path: str | None) -> bool:
    """Whether a recipe's `data.path` names token files and not a text."""
    if path is None:
        return False
    several = len(path.split()) > 1 and not os.path.exists(path)
    return _has_index(prefix_of(path)) or path.endswith(".bin") or several


def prefix_of(path: str) -> str:
    """The prefix, where `path` names its .bin or .idx; anything else as it is."""
    stem = path[:-4] if path.endswith((".bin", ".idx")) else path
    return path if _has_index(path) or not _has_index(stem) else stem


def _has_index(prefix: str) -> bool:
    return os.path.isfile(idx_path(prefix))  # which, unlike Path.is_file, takes names too long for a file


def prefixes_near(path: str) -> list[str]:
    """Datasets that `dtgpt prepare --output-prefix path` made."""
    return [name.removesuffix(".idx") for name in sorted(glob(f"{escape(path)}_*_document.idx"))]


def no_dataset(path: str) -> UserError:
    """There is nothing at `path`; here is what lies near it."""
    near = prefixes_near(path)
    if path.endswith(SUFFIXES) and os.path.isfile(path):
        return UserError(
            f"{path} is a text, and a run takes one text alone, as data.path; join several, as with cat, or make token "
            f"files of them: dtgpt prepare {path} ... --output-prefix PREFIX"
        )
    if near:
        remedy = f"did you mean {near[0]}?"
    elif os.path.isfile(bin_path(path)):
        remedy = f"copy or build {path}.idx again, or give {path}.bin where it is a shard of llm.c or nanoGPT"
    else:
        remedy = "give the prefix of a .bin and .idx, or shards .bin of llm.c or nanoGPT"
    missing = "" if path.endswith((".bin", ".idx")) else f" (no {path}.idx)"
    return UserError(f"there is no dataset {path}{missing}; {remedy}")


def load_prepared(
    data: "DataConfig", seq_length: int, train_samples: int, held_out_samples: int, seed: int, cache: Path,
    vocab_size: int = 0,
) -> PreparedDataset:  # fmt: skip
    """`train_samples`: of how many the order is built, as Megatron-LM's --train-samples; `held_out_samples`: at most so
    many for validation, and for test; `vocab_size` of the model. Raises UserError where a file is missing or damaged,
    or the training or the validation part of the split has no data; a test part without is left out."""
    paths = {name: getattr(data, name) for name in ("path", "valid_path", "test_path")}
    parsed = {path: parse_data_path(_words(name, path)) for name, path in paths.items() if path is not None}
    prefixes = [prefix_of(prefix) for found, _ in parsed.values() for prefix in found]
    if text := next((p for p in prefixes if p.endswith(SUFFIXES) and not _has_index(p)), None):
        raise no_dataset(text)
    tokenizer = tokenizer_of(data, prefixes, vocab_size)
    opened: dict[str, TokenSequences] = {}

    def samples(path: str | None, which: str, split: str | None, count: int) -> Samples | Blend | None:
        if path is None:
            return None
        prefixes, weights = parsed[path]
        for prefix in prefixes:
            if prefix not in opened:
                opened[prefix] = open_sequences(prefix, tokenizer.end_of_text)
        sequences = [opened[prefix] for prefix in prefixes]
        alone = weights is not None or len(prefixes) == 1  # other blends take what there is, a sample at least
        if split is not None and not _is_wanted(sequences, split, which, 2 if alone else seq_length + 1):
            return None
        if split is not None and which == "valid":
            _point_to_validation_data(prefixes, sequences, split)
        load = load_blend if which == "train" else load_each_once
        return load(sequences, weights, split, which, seq_length, count, seed, cache)

    own = data.valid_path is not None or data.test_path is not None  # each path is there for one part alone
    split = None if own else data.split
    valid_path, test_path = (data.valid_path, data.test_path) if own else (data.path, data.path)
    train = samples(data.path, "train", split, train_samples)
    valid = samples(valid_path, "valid", split, held_out_samples)
    test = samples(test_path, "test", split, held_out_samples)
    assert train is not None and data.path is not None  # a recipe without a path has a text
    return PreparedDataset(tokenizer, train, valid, test, data.path)


def _words(name: str, path: str) -> list[str]:
    """The prefixes, and weights, in the value of the option data.`name`."""
    if _has_index(prefix_of(path)) or os.path.exists(path) or len(path.split()) == 1:
        return [path]
    try:
        return shlex.split(path)
    except ValueError as error:
        raise UserError(
            f"data.{name}={shown(path)} cannot be cut into prefixes, or weights and prefixes ({error}); put a name "
            f"""that has a quote or a blank into double quotes, as in '0.3 "it's A" 0.7 B'"""
        ) from None


def _point_to_validation_data(prefixes: Sequence[str], sequences: Sequence[TokenSequences], split: str) -> None:
    """Shards of nanoGPT come with validation data of their own: say where they may be. Raises UserError where the
    split leaves none of the documents for validation."""
    shards = [Path(prefix) for prefix, s in zip(prefixes, sequences, strict=True) if isinstance(s, TokenShards)]
    if not shards:
        return
    beside = next((path for path in (shard.with_name("val.bin") for shard in shards) if os.path.isfile(path)), None)
    if beside in shards:
        return
    parts = [(s, split_range(split, "valid", len(s))) for s in sequences]
    if not any(s.lengths[part.start : part.stop].sum(dtype=np.int64) for s, part in parts):
        count = sum(map(len, sequences))
        raise UserError(
            f"{shards[0]} is cut into {count} document{'s' * (count != 1)}, of which data.split={split} leaves none "
            f"for validation; give others as --data.valid_path {beside or 'val.bin'}, or --data.split 1 for none"
        )
    if beside:
        say(f"validation takes a part of {shards[0]}; {beside} beside it is taken with --data.valid_path {beside}")


def _is_wanted(sequences: Sequence[TokenSequences], split: str, which: str, least: int) -> bool:
    """Whether a part has a weight in the split; that for test, which not everybody cares for, needs `least` tokens of
    each dataset too."""
    if split_fractions(split)[SPLITS.index(which)] is None:
        return which == "train"  # without which nothing goes on: an error later
    if which != "test":
        return True
    parts = [s.lengths[r.start : r.stop] for s in sequences for r in [split_range(split, which, len(s))]]
    return all(part.sum(dtype=np.int64) >= least for part in parts)


def open_sequences(path: str, end_of_text: int | None) -> TokenSequences:
    """A prefix of `.bin` and `.idx`, or one of these, or shards `.bin` (a glob: several). Raises UserError."""
    prefix = prefix_of(path)
    if _has_index(prefix):
        return IndexedDataset(prefix)
    if path.endswith(".bin"):
        shards = sorted(glob(path))
        if shards:
            return TokenShards(shards, end_of_text)
    raise no_dataset(path)


def _num_tokens(samples: Samples | Blend) -> int:
    """Of one epoch of all datasets."""
    total = 0
    for part in samples.datasets:
        documents = np.asarray(part.index.document_index)  # all of a range, in each epoch
        total += int(part.sequences.lengths[documents.min() : documents.max() + 1].sum(dtype=np.int64))
    return total


def _digest(tokenizer: Tokenizer, *parts: Samples | Blend | None) -> str:
    """Of all that decides which tokens a sample has: lengths, contents as far as they are looked at, and the order."""
    settings: list[object] = [hashlib.sha256(b"".join(tokenizer.ranks)).hexdigest()]
    for samples in parts:
        if not samples:
            continue
        if isinstance(samples, Blend):
            settings.append(np.bincount(samples.dataset_index[:1000]).tolist())
        for part in samples.datasets:
            sequences, index = part.sequences, part.index
            beginning = [index.document_index[:64].tolist(), index.shuffle_index[:64].tolist()]
            contents = [sequences.digest, sequences.content_digest]
            settings.append([*contents, index.seq_length, len(index.document_index), beginning])
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()
