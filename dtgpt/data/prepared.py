"""Training on token files: those of `dtgpt prepare` and Megatron-LM, and shards of llm.c and nanoGPT.

Sample i of a run is sample i of Megatron-LM's GPTDataset, or of its blend, for the same seed, split, sequence length
and number of samples (`dtgpt.data.samples`, `blend`).
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.blend import Blend, load_blend, parse_data_path
from dtgpt.data.dataset import Dataset, check_vocabulary
from dtgpt.data.indexed import IndexedDataset, idx_path
from dtgpt.data.samples import Samples, split_fractions
from dtgpt.data.token_shards import TokenSequences, TokenShards
from dtgpt.errors import UserError
from dtgpt.tokenizers.tokenizer import Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from dtgpt.recipe import DataConfig

PROBED = 256  # samples by which bytes per token are estimated


class PreparedDataset(Dataset):
    """Samples of a training and a validation part; `valid` None: there is none."""

    def __init__(self, tokenizer: Tokenizer, train: Samples | Blend, valid: Samples | Blend | None, source: str):
        self.tokenizer, self.train, self.valid, self.source = tokenizer, train, valid, source
        self.num_train_tokens, self.num_valid_tokens = _num_tokens(train), _num_tokens(valid) if valid else 0
        self.digest = _digest(tokenizer, train, valid)

    def windows(self, sample_ids: Tensor, seq_length: int, key: Tensor) -> Tensor:
        """A run that takes more samples than its order was built for begins the order again."""
        ids = sample_ids.numpy() % len(self.train)
        windows = self.train.windows(ids)
        largest = int(windows.max())
        if largest >= self.tokenizer.vocab_size:
            raise UserError(
                f"{self.source} holds token {largest}, but its tokenizer has {self.tokenizer.vocab_size} tokens; give "
                "the tokenizer that the data were prepared with"
            )
        return windows

    def held_out(self, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
        count = min(len(self.valid), max_samples) if self.valid else 0
        for first in range(0, count, batch_size):
            yield self.valid.windows(np.arange(first, min(first + batch_size, count)))

    def bytes_per_token(self) -> float:
        ids = torch.arange(min(PROBED, len(self.train)))
        tokens = self.windows(ids, 0, ids).flatten().numpy()
        counts = np.bincount(tokens, minlength=self.tokenizer.vocab_size)
        return float(counts @ self.tokenizer.token_bytes()) / len(tokens)

    def check(self, seq_length: int, vocab_size: int) -> None:
        check_vocabulary(self.tokenizer, vocab_size)


def is_prepared(path: str | None) -> bool:
    """Whether a recipe's `data.path` names token files and not a text."""
    if path is None:
        return False
    several = len(path.split()) > 1 and not Path(path).exists()
    return idx_path(path).is_file() or path.endswith(".bin") or several


def load_prepared(
    data: "DataConfig", seq_length: int, train_samples: int, valid_samples: int, seed: int, cache: Path
) -> PreparedDataset:
    """`train_samples`: of how many the order is built, as Megatron-LM's --train-samples; `valid_samples`: at most so
    many for validation. Raises UserError where a file is missing or damaged, or a part of the split has no data."""
    tokenizer = tokenizer_of(data)
    opened: dict[str, TokenSequences] = {}

    def samples(path: str, which: str, split: str | None, count: int) -> Samples | Blend:
        prefixes, weights = parse_data_path([path] if idx_path(path).is_file() else shlex.split(path))
        for prefix in prefixes:
            if prefix not in opened:
                opened[prefix] = open_sequences(prefix, tokenizer.end_of_text)
        sequences = [opened[prefix] for prefix in prefixes]
        return load_blend(sequences, weights, split, which, seq_length, count, seed, cache)

    whole = data.valid_path is not None  # each path is there for one part alone
    train = samples(data.path, "train", None if whole else data.split, train_samples)
    valid = None
    if whole:
        valid = samples(data.valid_path, "valid", None, valid_samples)
    elif split_fractions(data.split)[1] is not None:
        valid = samples(data.path, "valid", data.split, valid_samples)
    return PreparedDataset(tokenizer, train, valid, data.path)


def open_sequences(path: str, end_of_text: int | None) -> TokenSequences:
    """A prefix of `.bin` and `.idx`, or shards `.bin` (a glob: several). Raises UserError."""
    if idx_path(path).is_file():
        return IndexedDataset(path)
    if path.endswith(".bin"):
        shards = sorted(glob(path))
        if shards:
            return TokenShards(shards, end_of_text)
    raise UserError(
        f"there is no dataset {path}; give the prefix of a .bin and .idx, without these, or shards of llm.c or nanoGPT"
    )


def tokenizer_of(data: "DataConfig") -> Tokenizer:
    """With which token files were prepared. Raises UserError where nothing tells."""
    if data.tokenizer_file is not None:
        return Tokenizer.load(Path(data.tokenizer_file), remedy="train it again with dtgpt tokenizer train")
    if data.tokenizer in ("auto", "bpe"):
        raise UserError(
            f"{data.path} holds tokens, and nothing tells of which tokenizer; use --data.tokenizer gpt2 or bytes, or "
            "--data.tokenizer_file with what dtgpt tokenizer train wrote"
        )
    return make_tokenizer(data.tokenizer, [], 0, data.vocab_file, data.merge_file)


def _parts(samples: Samples | Blend) -> Sequence[Samples]:
    return samples.datasets if isinstance(samples, Blend) else [samples]


def _num_tokens(samples: Samples | Blend) -> int:
    """Of one epoch of all datasets."""
    total = 0
    for part in _parts(samples):
        documents = part.index.document_index  # all of a range, in each epoch
        total += int(part.sequences.lengths[documents.min() : documents.max() + 1].sum(dtype=np.int64))
    return total


def _digest(tokenizer: Tokenizer, *parts: Samples | Blend | None) -> str:
    """Of all that decides which tokens a sample has: contents by their lengths, and the order."""
    settings: list[object] = [hashlib.sha256(b"".join(tokenizer.ranks)).hexdigest()]
    for samples in filter(None, parts):
        if isinstance(samples, Blend):
            settings.append(np.bincount(samples.dataset_index[:1000]).tolist())
        for part in _parts(samples):
            index = part.index
            beginning = [index.document_index[:64].tolist(), index.shuffle_index[:64].tolist()]
            settings.append([part.sequences.digest, index.seq_length, len(index.document_index), beginning])
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()
