"""Text -> token arrays -> batches, which are pure functions of (data, key, sample id).

A run must see the same samples whatever its plan is and wherever it goes on, or its loss curve would change. Sample i
of a run is a window of T + 1 tokens whose place is drawn from (key, i) alone: the same sample under any number of
devices, any micro-batch size and after a resume. Validation windows lie side by side and never change."""

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtgpt.data.text import EMBEDDED, read_documents, split_documents
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer, check_opening
from dtgpt.models.batch import Batch, WindowMasks
from dtgpt.ops.random.philox import fold
from dtgpt.util import seams
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError

if TYPE_CHECKING:
    from dtgpt.config.sections import DataConfig

HeldOutPart = Literal["valid", "test"]
PART_NAMES: dict[HeldOutPart, str] = {"valid": "validation", "test": "test"}
PERPLEXITIES = tuple(f"{name}_perplexity" for name in PART_NAMES.values())  # in records, next to the losses
BLOCK = 1 << 22  # tokens read together
FIRST_LOOK = ("bpe", "gpt2")  # tokenizers that `auto` means; the embedded text is there for a first look at any model
ROUNDING = 128  # vocabularies are often padded to a multiple of it, for speed


class AnswerStart(NamedTuple):
    """Tokens after which an answer follows. `ends`: the token with which that one ends."""

    ids: list[int]
    ends: tuple[int, ...]


class Dataset(ABC):
    """Data of a run, for training and evaluation. `source`: for messages; `digest`: of all that decides which tokens a
    sample has; `former_digest`: what older versions computed, if that was something else."""

    tokenizer: Tokenizer
    source: str
    digest: str
    former_digest: str | None = None
    only_for: str | None = None  # what the data have that a language model does not learn from, with the remedy

    @property
    @abstractmethod
    def num_train_tokens(self) -> int: ...

    @property
    @abstractmethod
    def num_valid_tokens(self) -> int: ...

    @abstractmethod
    def num_samples(self, part: Literal["train"] | HeldOutPart, seq_length: int) -> int:
        """Return the samples of a part that are there once: of an epoch in training, at most those of an evaluation."""

    @abstractmethod
    def windows(self, sample_ids: Tensor, seq_length: int, key: Tensor) -> Tensor:
        """Return training samples int64 `[B, seq_length + 1]` on the CPU: a function of `sample_ids [B]`, the data and
        the `key [2]` of a run alone. Where tokens have marks they are `[B, seq_length + 1, 2]`."""

    @abstractmethod
    def held_out(self, part: HeldOutPart, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
        """Yield the fixed windows for validation or test, in the form of `windows`, at most `max_samples`."""

    def to_batch(self, windows: Tensor, masks: WindowMasks, dropout_keys: Tensor | None = None) -> Batch:
        """Return the batch of `windows`, on any device, with the `masks` that a recipe asks for."""
        return masks.batch(windows, dropout_keys)

    def beginnings(self, count: int, positions: int) -> list[AnswerStart]:
        """Return at most `count` beginnings with which a model of so many positions can go on, held-out ones where
        there are any; none of data that do not say where an answer begins."""
        return []

    @abstractmethod
    def bytes_per_token(self) -> float:
        """Return the mean over the training split, which turns a training loss into bits per byte."""

    @abstractmethod
    def check(self, seq_length: int, vocab_size: int) -> None:
        """Raise UserError if a model of this shape cannot be trained on these tokens."""


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Tokens of both splits, and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    source: str
    digest: str
    former_digest: str | None = None

    @property
    def num_train_tokens(self) -> int:
        return len(self.train)

    @property
    def num_valid_tokens(self) -> int:
        return len(self.valid)

    def num_samples(self, part: Literal["train"] | HeldOutPart, seq_length: int) -> int:
        tokens = {"train": len(self.train), "valid": len(self.valid), "test": 0}[part]
        return max(tokens - 1, 0) // seq_length

    def windows(self, sample_ids: Tensor, seq_length: int, key: Tensor) -> Tensor:
        return training_batch(self.train, key, sample_ids, seq_length)

    def held_out(self, part: HeldOutPart, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
        tokens = self.valid if part == "valid" else self.valid[:0]  # a text has no part for test
        return held_out_batches(tokens, seq_length, batch_size, max_samples)

    def bytes_per_token(self) -> float:
        counts = np.bincount(self.train, minlength=self.tokenizer.vocab_size)
        return float(counts @ self.tokenizer.token_bytes()) / len(self.train)

    def check(self, seq_length: int, vocab_size: int) -> None:
        for name, tokens in (("training", self.train), ("validation", self.valid)):
            if 0 < len(tokens) <= seq_length or (name == "training" and len(tokens) == 0):
                raise UserError(
                    f"the {name} text has {counted(len(tokens), 'token')}, but seq_length={seq_length} needs at "
                    f"least {seq_length + 1}; use more text, a shorter --seq_length or another --data.held_out "
                    "(0 for none)"
                )
        check_vocabulary(self.tokenizer, vocab_size)
        if self.source != EMBEDDED or self.tokenizer.name not in FIRST_LOOK:
            warn_of_unused_rows(self.tokenizer, vocab_size)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise UserError if a model of `vocab_size` has fewer tokens than the tokenizer."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} tokens; "
            f"use --model.vocab_size {tokenizer.vocab_size} or more, or another --data.tokenizer"
        )


def warn_of_unused_rows(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Warn if a model has so many more tokens than the tokenizer that it is not for rounding."""
    unused = vocab_size - tokenizer.vocab_size
    if unused >= ROUNDING and unused > tokenizer.vocab_size // 20:
        say(
            f"model.vocab_size={vocab_size}, but the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens: "
            f"{unused} rows of the embedding occur in no text; --model.vocab_size {tokenizer.vocab_size} has none",
            warning=True,
        )


def needs_shards() -> UserError:
    return UserError(
        "data.order=sequential takes the shards .bin of one data.path, as llm.c or nanoGPT has them, and others as "
        "data.valid_path; give these, or --data.order shuffled"
    )


class TextTokens(NamedTuple):
    """The tokens of a text, and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    former_digest: str | None = None


def load_dataset(data: "DataConfig", cache: Path) -> TextDataset:
    """Return the tokens of a text, which a capability may keep in the folder `cache`. The kind of tokenizer is not
    `auto` any more."""
    if data.order == "sequential":
        raise needs_shards()
    documents = read_documents(data.path, data.json_key)
    named = open_tokenizer(data.tokenizer_file) if data.tokenizer_file else None
    if named:
        check_opening(named)

    def make() -> TextTokens:
        train, valid = split_documents(documents, data.held_out)
        if data.tokenizer == "gpt2" and data.vocab_file:
            made = open_tokenizer("gpt2", data.vocab_file, data.merge_file)
        else:
            learns_from = documents if data.tokenizer == "char" else train
            made = named or make_tokenizer(data.tokenizer, learns_from, data.bpe_vocab_size)
        made.warn_of_names(documents, "dtgpt prepare --encode-special makes them these tokens")
        return TextTokens(made, made.encode_documents(train), made.encode_documents(valid))

    keep = next(iter(seams.listed("caches")), None)
    known, train, valid, former = make() if keep is None else keep(data, documents, named, cache, make)
    return TextDataset(known, train, valid, data.path or EMBEDDED, _digest(known, train, valid), former)


def _digest(tokenizer: Tokenizer, *parts: np.ndarray) -> str:
    """Return the digest of the tokens for training and validation, and of what they mean."""
    digest = hashlib.sha256(b"".join([*tokenizer.ranks, f" {tokenizer.end_of_text}".encode()]))
    for tokens in parts:
        digest.update(f" {tokens.dtype.str} {len(tokens)} ".encode())
        for begin in range(0, len(tokens), BLOCK):
            digest.update(tokens[begin : begin + BLOCK].data)
    return digest.hexdigest()


def default_cache() -> Path:
    """Return `$DTGPT_CACHE`, or a folder in the user's cache directory (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("DTGPT_CACHE") or Path(base) / "dtgpt").expanduser()
    except RuntimeError:
        raise UserError(
            f"no home folder is known for the user {os.getuid()} (HOME is not set); set DTGPT_CACHE to a "
            "folder for tokens"
        ) from None


def _windows(tokens: np.ndarray, starts: np.ndarray, seq_length: int) -> Tensor:
    width = seq_length + 1
    found = tokens[(starts[:, None] + np.arange(width)).reshape(-1)]
    return torch.from_numpy(found.astype(np.int64).reshape(len(starts), width))


def training_batch(tokens: np.ndarray, key: Tensor, sample_ids: Tensor, seq_length: int) -> Tensor:
    """Return windows int64 `[B, seq_length + 1]` of the samples `sample_ids [B]`, for the `key [2]` of a run."""
    low, high = fold(key, sample_ids).unbind(-1)
    draw = (high << 31) ^ low  # 63 bits: uniform over any text
    return _windows(tokens, (draw % (len(tokens) - seq_length)).numpy(), seq_length)


def held_out_batches(tokens: np.ndarray, seq_length: int, batch_size: int, max_samples: int) -> Iterator[Tensor]:
    """Yield the first `max_samples` windows side by side, int64 `[B, seq_length + 1]` with B = batch_size or less."""
    count = min(max(len(tokens) - 1, 0) // seq_length, max_samples)
    for first in range(0, count, batch_size):
        yield _windows(tokens, np.arange(first, min(first + batch_size, count)) * seq_length, seq_length)


def perplexity(nats: float) -> float:
    """Return e to the power of a loss, at most e^20, the limit of Megatron-LM."""
    return math.exp(min(nats, 20.0))


def bits_per_byte(nats: float, bytes_: float) -> float | None:
    """Return the loss in a unit that does not depend on the tokenizer; None if no bytes are known."""
    return nats / math.log(2) / bytes_ if bytes_ else None


Make = Callable[[int], tuple[Tensor, ...]]  # the tensors of a step on the CPU


class Batches:
    """The tensors of a step on the device, made when they are taken. A capability makes those of the next step
    meanwhile."""

    def __init__(self, make: Make, device: torch.device):
        self.make, self.device = make, device

    def take(self, step: int) -> tuple[Tensor, ...]:
        """Return the tensors of `step`."""
        return tuple(tensor.to(self.device) for tensor in self.make(step))
