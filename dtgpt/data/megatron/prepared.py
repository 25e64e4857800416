"""Training on token files: those of `dtgpt prepare` and Megatron-LM, and shards of llm.c and nanoGPT.

Sample i of a run is sample i of Megatron-LM's GPTDataset, or of its blend, for the same seed, split, sequence length
and number of samples (`dtgpt.data.megatron.samples`, `blend`).
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.dataset import Dataset, HeldOutPart, check_vocabulary, needs_shards, warn_of_unused_rows
from dtgpt.data.megatron.blend import Blend, load_blend, load_each_once, parse_data_path
from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.megatron.paths import SHARDS, has_index, has_weights, no_dataset, prefix_of
from dtgpt.data.megatron.samples import SPLITS, SampleRequest, Samples, count_tokens, sequential_index, split_fractions
from dtgpt.data.megatron.token_shards import TokenSequences, TokenShards, shard_paths
from dtgpt.data.megatron.tokenizer_beside import tokenizer_of
from dtgpt.data.text import SUFFIXES
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

if TYPE_CHECKING:
    from dtgpt.config.sections import DataConfig

PROBED = 256  # samples of each part that are looked at before a run begins


class PreparedDataset(Dataset):
    """Samples for training, validation and test; the last two may be None."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        train: Samples | Blend,
        valid: Samples | Blend | None,
        test: Samples | Blend | None,
        source: str,
    ):
        self.tokenizer, self.train, self.valid, self.test, self.source = tokenizer, train, valid, test, source
        self.digest = _digest(tokenizer, train, valid)

    @cached_property
    def num_train_tokens(self) -> int:
        return _num_tokens(self.train)

    @cached_property
    def num_valid_tokens(self) -> int:
        return _num_tokens(self.valid) if self.valid else 0

    def num_samples(self, part: Literal["train"] | HeldOutPart, seq_length: int) -> int:
        samples = {"train": self.train, "valid": self.valid, "test": self.test}[part]
        return max(_num_tokens(samples) - 1, 0) // seq_length if samples else 0

    def windows(self, sample_ids: Tensor, seq_length: int, key: Tensor) -> Tensor:
        """Return training samples; those after the last of the shuffle index begin it again."""
        return self._known(self.train, sample_ids.numpy() % len(self.train))

    def held_out(self, part: HeldOutPart, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
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
        """Return the windows of the samples `ids`. Raises UserError if a token of them is unknown."""
        windows = samples.windows(ids)
        check_ids(
            windows.numpy(), self.tokenizer, " or ".join(dict.fromkeys(p.sequences.name for p in samples.datasets))
        )
        return windows


def check_ids(tokens: np.ndarray, tokenizer: Tokenizer, name: str) -> None:
    """Raise UserError if `tokens`, of any shape, are not all known to the tokenizer. name: of what holds them."""
    wrong = tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)]
    if wrong.size:
        owner, remedy = f"tokenizer {tokenizer.name}", "give the tokenizer that the data were prepared with"
        if wrong.min() < 0:
            raise UserError(
                f"{name} holds {wrong.min()}, which is no token; it is damaged or of another kind: build it again"
            )
        if not tokenizer.spells:
            owner, remedy = "model", f"give a larger --model.vocab_size: token {wrong.max()} is among them"
        raise UserError(f"{name} holds token {wrong[0]}, but the {owner} has {tokenizer.vocab_size} tokens; {remedy}")


def load_prepared(
    data: "DataConfig",
    seq_length: int,
    train_samples: int,
    held_out_samples: int,
    seed: int,
    cache: Path,
    vocab_size: int = 0,
    batch: int = 1,
) -> Dataset:
    """Open prepared data. train_samples: number of samples to build the shuffle index for, as Megatron-LM's
    --train-samples. held_out_samples: the most for validation, and for test. vocab_size: of the model. batch: samples
    of a step, after the last of which a file is cut where the order is sequential. Raises UserError if a file is
    missing or damaged, or if the training or validation part has no data; an empty test part is left out.
    """
    parsed = parsed_paths(data)
    prefixes = checked_prefixes(data)
    tokenizer = tokenizer_of(data, prefixes, vocab_size)
    opened: dict[str, TokenSequences] = {}
    if any(map(has_weights, prefixes)):  # those of chats alone are of other formats, which are asked before
        raise blended_with_chats(data)

    def samples(path: str | None, which: str, split: str | None, count: int) -> Samples | Blend | None:
        if path is None:
            return None
        prefixes, weights = parsed[path]
        for prefix in prefixes:
            if prefix not in opened:
                whole = data.order == "sequential"  # each file is one sequence
                end = None if whole else tokenizer.end_of_text
                opened[prefix] = open_sequences(prefix, end, tokenizer.begin_of_text)
        sequences = [opened[prefix] for prefix in prefixes]
        alone = weights is not None or len(prefixes) == 1  # other blends take what there is, a sample at least
        if split is not None and not _is_wanted(sequences, split, which, 2 if alone else seq_length + 1):
            return None
        if split is not None and which == "valid":
            _check_validation(sequences, split)
        if data.order == "sequential":
            if len(sequences) > 1 or not isinstance(sequences[0], TokenShards) or split is not None:
                raise needs_shards()
            files = sequences[0]
            size = batch if which == "train" else 1
            index = sequential_index(files.lengths, seq_length, size, f"the {which} part of {files.name}")
            return Samples(files, index)
        load = load_blend if which == "train" else load_each_once
        return load(sequences, weights, SampleRequest(split, which, seq_length, count, seed, cache))

    own = data.valid_path is not None or data.test_path is not None  # each path is there for one part alone
    split = None if own else data.split
    valid_path, test_path = (data.valid_path, data.test_path) if own else (data.path, data.path)
    train = samples(data.path, "train", split, train_samples)
    valid = samples(valid_path, "valid", split, held_out_samples)
    test = samples(test_path, "test", split, held_out_samples)
    assert train is not None and data.path is not None  # a recipe without a path has a text
    return PreparedDataset(tokenizer, train, valid, test, data.path)


def prefixes_of(data: "DataConfig") -> list[str]:
    """Return the prefixes, and shards, of all paths of prepared data. Raises UserError."""
    return [prefix_of(prefix) for found, _ in parsed_paths(data).values() for prefix in found]


def checked_prefixes(data: "DataConfig") -> list[str]:
    """Return the prefixes, and shards, of all paths. Raise UserError for a text, and for one beside chats that has no
    index."""
    prefixes = prefixes_of(data)
    with_index = any(map(has_weights, prefixes))
    if absent := next((p for p in prefixes if (with_index or p.endswith(SUFFIXES)) and not has_index(p)), None):
        raise no_dataset(absent)
    return prefixes


def blended_with_chats(data: "DataConfig") -> UserError:
    return UserError(
        f"data.path={shown(data.path)} has chats, which are not blended with other data; give all their files to one "
        "dtgpt prepare --chat, or --preferences where they hold pairs"
    )


def parsed_paths(data: "DataConfig") -> dict[str, tuple[list[str], list[float] | None]]:
    """Return prefixes and weights by the path that names them."""
    paths = {name: getattr(data, name) for name in ("path", "valid_path", "test_path")}
    return {path: parse_data_path(_words(name, path)) for name, path in paths.items() if path is not None}


def _words(name: str, path: str) -> list[str]:
    """Return the prefixes, and weights, in the value of the option data.`name`."""
    if has_index(prefix_of(path)) or len(path.split()) == 1 or shard_paths(path):
        return [path]
    try:
        return shlex.split(path)
    except ValueError as error:
        raise UserError(
            f"data.{name}={shown(path)} cannot be cut into prefixes, or weights and prefixes ({error}); put a name "
            f"""that has a quote or a blank into double quotes, as in '0.3 "it's A" 0.7 B'"""
        ) from None


def _check_validation(sequences: Sequence[TokenSequences], split: str) -> None:
    """Raise UserError if the split leaves no token of shards for validation, which often have a file of its own."""
    shards = next((s for s in sequences if isinstance(s, TokenShards)), None)
    if shards is not None and not any(count_tokens(s, split, "valid") for s in sequences):
        raise UserError(
            f"{shards.name} is cut into {counted(sum(map(len, sequences)), 'document')}, of which data.split={split} "
            "leaves none for validation; give others as --data.valid_path, such as val.bin, or --data.split 1 for none"
        )


def _is_wanted(sequences: Sequence[TokenSequences], split: str, which: str, least: int) -> bool:
    """Return whether a part has a weight in the split; the part for test also needs `least` tokens of each dataset."""
    if split_fractions(split)[SPLITS.index(which)] is None:
        return which == "train"  # without which nothing goes on: an error later
    return which != "test" or all(count_tokens(s, split, which) >= least for s in sequences)


def open_sequences(path: str, end_of_text: int | None, begin_of_text: int | None = None) -> TokenSequences:
    """Open a prefix of `.bin` and `.idx`, one of these, or shards (a glob: several). Raises UserError."""
    prefix = prefix_of(path)
    if has_index(prefix):
        return IndexedDataset(prefix)
    if path.endswith(SHARDS) and (shards := shard_paths(path)):
        return TokenShards(shards, end_of_text, begin_of_text)
    raise no_dataset(path)


def _num_tokens(samples: Samples | Blend) -> int:
    """Return the number of tokens in one epoch of all datasets."""
    total = 0
    for part in samples.datasets:
        documents = np.asarray(part.index.document_index)  # all of a range, in each epoch
        total += int(part.sequences.lengths[documents.min() : documents.max() + 1].sum(dtype=np.int64))
    return total


def _digest(tokenizer: Tokenizer, *parts: Samples | Blend | None) -> str:
    """Return a digest of what decides the tokens of samples: lengths, contents (in part) and order."""
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
