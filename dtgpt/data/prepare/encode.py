"""Blocks of documents to tokens: what a worker of `dtgpt prepare` does."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np

from dtgpt.data.library_tokenizers.base import SpecialNames
from dtgpt.data.megatron.indexed import token_dtype
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.documents import Document
from dtgpt.data.prepare.fast import Fast, fast_for, is_installed, is_known
from dtgpt.data.prepare.inputs import Lines, Parsed
from dtgpt.data.text import Broken
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.console import say

COMPARED = 1 << 21  # characters of the input that both libraries encode; less is not worth a second one
MOST_BLOCKS = 16  # that are read for these
LARGE = 1 << 28  # bytes of inputs for which a package is recommended


@dataclass
class EncodedKey:
    """One field of a block's documents. `tokens` back to back; `lengths [S]` of its sequences in tokens, int32;
    `counts [D]` of sequences in each document, int32; `weights` of the tokens, uint8, for chats."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    weights: np.ndarray | None = None


@dataclass(kw_only=True)
class Encoded:
    """A block: its fields by key, broken lines, and counts over all keys. `position` as the block's; `empty` documents
    have no token under any key; `longest` in tokens; `text_tokens` without ends of documents and the like; `split`:
    names of special tokens that became text. Of chats: `uncounted`, in which nothing counts, are left out; `thoughts`
    of answers that the text has (True) or not; `unused` fields, as `row id`."""

    position: int
    keys: dict[str, EncodedKey]
    broken: list[Broken]
    documents: int
    empty: int = 0
    longest: int = 0
    text_bytes: int = 0
    text_tokens: int = 0
    split: Counter[str] = field(default_factory=Counter)
    uncounted: int = 0
    thoughts: Counter[bool] = field(default_factory=Counter)
    unused: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Encoder:
    """`block -> Encoded`, to be pickled into workers. `end` and `begin`: the ids that close each document that has
    tokens, and open each of its sequences; None: nothing is added. `fast`: what gives the ids of `vocabulary` in less
    time, where there is something."""

    vocabulary: Tokenizer
    keys: tuple[str, ...]
    dtype: np.dtype
    end: int | None = None
    begin: int | None = None
    special: bool = False
    fast: Fast | None = None

    @cached_property
    def _names(self) -> SpecialNames | None:
        return None if self.special or not self.vocabulary.special_names else SpecialNames(self.vocabulary)

    def __call__(self, block: Lines | Parsed) -> Encoded:
        documents: list[Document] = []
        broken: list[Broken] = []
        for found in block.documents(self.keys):
            if isinstance(found, Broken):
                broken.append(found)
            else:
                documents.append(found)
        encoded = Encoded(position=block.position, keys={}, broken=broken, documents=len(documents))
        sizes = np.zeros(len(documents), np.int64)
        for key in self.keys:
            encoded.keys[key] = self._encode(encoded, [document[key] for document in documents], sizes)
        encoded.empty, encoded.longest = int((sizes == 0).sum()), int(sizes.max(initial=0))
        return encoded

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        if self.fast is not None:
            # The defining library says what is wrong with a text.
            with suppress(Exception):
                return self.fast.encode_batch(texts, self.special)
        return self.vocabulary.encode_batch(texts, self.special)

    def _encode(self, encoded: Encoded, documents: list[list[str]], sizes: np.ndarray) -> EncodedKey:
        """Add to the counts of `encoded`, and the tokens of each document to `sizes [D]`."""
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        counts: list[int] = []
        end, begin = (None if i is None else np.array([i], np.uint32) for i in (self.end, self.begin))
        texts = [piece for pieces in documents for piece in pieces]
        ids_of_texts = iter(self._ids(texts))
        for number, pieces in enumerate(documents):
            before = len(lengths)
            for ids in islice(ids_of_texts, len(pieces)):
                if len(ids):
                    encoded.text_tokens += len(ids)
                    parts += [ids] if begin is None else [begin, ids]
                    lengths.append(len(ids) + (begin is not None))
            if end is not None and len(lengths) > before:
                parts.append(end)
                lengths[-1] += 1
            counts.append(len(lengths) - before)
            sizes[number] += sum(lengths[before:])
        if self._names is not None:
            encoded.split += self._names.count(texts)
        encoded.text_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        tokens = np.concatenate(parts, dtype=self.dtype, casting="unsafe") if parts else np.empty(0, self.dtype)
        return EncodedKey(tokens, np.array(lengths, np.int32), np.array(counts, np.int32))


def quicken(
    encoder: Encoder, blocks: Iterator[Lines | Parsed], size: int | None
) -> tuple[Encoder, Iterator[Lines | Parsed]]:
    """Return an encoder to the same ids by fastokens, where that can be had, and all the blocks, of which some are read
    before. size: bytes of the inputs, None where unknown. Raises UserError where inputs cannot be read or encoded."""
    vocabulary = encoder.vocabulary
    if not is_known(vocabulary):
        return encoder, blocks
    if not is_installed():
        if (size or 0) >= LARGE:
            say("pip install 'dtgpt[fast]' brings fastokens, which encodes such inputs several times as fast")
        return encoder, blocks
    first: list[Lines | Parsed] = []
    texts: list[str] = []
    compared = 0
    for block in blocks:
        first.append(block)
        for text in _texts(block, encoder.keys):
            texts.append(text[: COMPARED - compared])
            compared += len(texts[-1])
        if compared >= COMPARED or len(first) == MOST_BLOCKS:
            fast = fast_for(vocabulary, texts, encoder.special)
            return replace(encoder, fast=fast), chain(first, blocks)
    return encoder, iter(first)


def _texts(block: Lines | Parsed, keys: tuple[str, ...]) -> Iterator[str]:
    for found in block.documents(keys):
        if not isinstance(found, Broken):
            yield from chain.from_iterable(found.values())


class MessageFormat:
    """Lines of messages, of which a capability makes tokens. `key`: of the files that are written."""

    key: str

    def quicken(
        self, encoder: Any, blocks: Iterator[Lines | Parsed], size: int | None
    ) -> tuple[Any, Iterator[Lines | Parsed]]:
        """Return an encoder to the same tokens in less time, where there is one, and all the blocks, of which it may
        have read some. size: bytes of the inputs, None where unknown. Raise UserError where inputs cannot be read."""
        return encoder, blocks

    def encoder(self, config: PrepareConfig, vocabulary: Tokenizer) -> Any:
        """Return what a worker does, `block -> Encoded`, with its `vocabulary` and `dtype`. Raise UserError where the
        tokenizer lacks what it needs."""
        raise NotImplementedError


def dtype_of(vocabulary: Tokenizer) -> np.dtype:
    """Return the type that Megatron-LM chooses by the number of tokens; a wider one if ids do not fit into it."""
    dtype = token_dtype(vocabulary.num_tokens)
    if vocabulary.vocab_size - 1 <= np.iinfo(dtype).max:
        return dtype
    say(
        f"{vocabulary.name} has {vocabulary.num_tokens:,} tokens but ids up to {vocabulary.vocab_size - 1:,}: tokens "
        "take 32 bits, where Megatron-LM would write 16 that do not hold them",
        warning=True,
    )
    return np.dtype("<i4")
