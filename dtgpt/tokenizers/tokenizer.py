"""What every tokenizer can do (`Vocabulary`), and byte-level BPE, which tiktoken encodes (`Tokenizer`).

A run carries its tokenizer with it: `save` writes plain JSON from which `Vocabulary.load` makes it again, without the
files that it once came from. A vocabulary can be pickled, so that workers need not read files again.
"""

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from dtgpt.errors import UserError
from dtgpt.storage import write_text
from dtgpt.tokenizers.training import train_ranks

END_OF_TEXT = "<|endoftext|>"
# What ends a document, where nothing else says so.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# GPT-2's pre-tokenization (Radford et al. 2019): contractions, words, numbers, other signs, white space.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Vocabulary(ABC):
    """Text <-> token ids. Ids are below `vocab_size`; `num_tokens` of them are in use. `end_of_text` and
    `begin_of_text` are None where unknown. `ranks` tells two vocabularies apart: the bytes of each token by id, or of
    all that the library reads which encodes."""

    name: str
    vocab_size: int
    num_tokens: int
    end_of_text: int | None
    begin_of_text: int | None = None
    ranks: list[bytes]

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """`special`: the names of special tokens in the text stand for these; else they are text as any other."""

    def encode_batch(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        """Ids of each text, uint32 `[tokens]`."""
        return [np.array(self.encode(text, special), np.uint32) for text in texts]

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """All documents, the end of text after each, as one uint16 or int32 array."""
        ids = [np.array([*self.encode(d), self.end_of_text]) for d in documents]
        return np.concatenate(ids or [np.array([])]).astype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD. Raises UserError for an id
        that is none of this vocabulary."""
        ids = list(map(int, ids))
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{wrong} is no token of {self.name}, which has ids 0 to {self.vocab_size - 1}; give the tokenizer "
                "that the tokens were made with"
            )
        return self._decode(ids)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id spells, int64 `[vocab_size]`; special tokens spell none. Where a library
        normalises text before it encodes, these are bytes of the normalised text."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_json()))

    @staticmethod
    def load(path: Path, remedy: str) -> "Vocabulary":
        """What `save` wrote; raises UserError, with `remedy`, where the file is not that."""
        try:
            return from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); {remedy}") from None


class Tokenizer(Vocabulary):
    """Byte-level BPE. `ranks`: the bytes of each token by id, b"" for an id that is special or not in use; without
    `specials` (ids by name) the id after the last is END_OF_TEXT. `ends`: names of the token that ends a document, the
    likeliest first. `vocab_size` and `num_tokens` where other ids or fewer than these count."""

    def __init__(
        self, name: str, pattern: str, ranks: list[bytes], specials: dict[str, int] | None = None,
        ends: tuple[str, ...] = ENDS, vocab_size: int = 0, num_tokens: int | None = None,
    ):  # fmt: skip
        self.name, self.pattern, self.ranks = name, pattern, ranks
        self.specials = {END_OF_TEXT: len(ranks)} if specials is None else specials
        self.vocab_size = max(len(ranks), vocab_size, *(i + 1 for i in self.specials.values()), 0)
        used = len(set(self.specials.values())) + sum(map(bool, ranks))
        self.num_tokens = used if num_tokens is None else num_tokens
        self.end_name = next((end for end in ends if end in self.specials), None)
        self.end_of_text = self.specials.get(self.end_name)

    @classmethod
    def from_encoding(cls, encoding: tiktoken.Encoding) -> "Tokenizer":
        """One of tiktoken's own."""
        specials = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        ids = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
        made = cls(encoding.name, encoding._pat_str, by_id(ids), specials)
        made._encoding = encoding
        return made

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        ids = {token: i for i, token in enumerate(self.ranks) if token}
        return tiktoken.Encoding(self.name, pat_str=self.pattern, mergeable_ranks=ids, special_tokens=self.specials)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_encoding"}

    def encode(self, text: str, special: bool = False) -> list[int]:
        if special:
            return self._encoding.encode(text, allowed_special="all", disallowed_special=())
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        allowed = set(self.specials) if special else frozenset()
        encode = self._encoding.encode_to_numpy
        return [encode(text, allowed_special=allowed, disallowed_special=()) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        names = {i: name.encode() for name, i in self.specials.items()}
        known = [self.ranks[i] if i < len(self.ranks) and self.ranks[i] else names.get(i, b"\xff") for i in ids]
        return b"".join(known).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        sizes = list(map(len, self.ranks))
        return np.array(sizes + [0] * (self.vocab_size - len(sizes)), np.int64)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "pattern": self.pattern, "specials": self.specials, "end": self.end_name,
            "vocab_size": self.vocab_size, "num_tokens": self.num_tokens,
            "ranks": [base64.b64encode(token).decode() for token in self.ranks],
        }  # fmt: skip


def from_json(saved: dict[str, Any]) -> Vocabulary:
    """The vocabulary whose `to_json` this is. Raises UserError where a package is missing, and ValueError, KeyError or
    TypeError where it is none."""
    if "tokenizer_json" in saved or "sentencepiece" in saved:
        from dtgpt.tokenizers.libraries import (
            from_json as from_library,  # known there, where these classes are built on
        )

        return from_library(saved)
    ranks = [base64.b64decode(token) for token in saved["ranks"]]
    if "specials" not in saved:  # of an older run
        return Tokenizer(saved["name"], saved["pattern"], ranks)
    ends = (saved["end"],) if saved["end"] is not None else ()
    sizes = saved["vocab_size"], saved["num_tokens"]
    return Tokenizer(saved["name"], saved["pattern"], ranks, saved["specials"], ends, *sizes)


def by_id(ids: dict[bytes, int]) -> list[bytes]:
    """The bytes of each id, b"" where there are none."""
    ranks = [b""] * (max(ids.values(), default=-1) + 1)
    for token, i in ids.items():
        ranks[i] = token
    return ranks


def make_tokenizer(
    kind: str,
    documents: Iterable[str],
    bpe_vocab_size: int,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Vocabulary:
    """The tokenizer `kind`: "bpe", trained on the documents; "gpt2", from its two files, or as tiktoken carries it
    (from its cache, or fetched by it once); or "bytes", the 256 bytes. Raises UserError where it cannot be made."""
    if kind == "gpt2" and vocab_file is not None:
        from dtgpt.tokenizers.vocabulary import from_files  # which makes a Tokenizer, or a library's

        return from_files(Path(vocab_file), Path(merge_file))
    if kind == "gpt2":
        return from_tiktoken("gpt2", "use --data.tokenizer bpe")
    if kind == "bytes":
        return Tokenizer("bytes", PATTERN, [bytes([b]) for b in range(256)])
    return Tokenizer("bpe", PATTERN, train_ranks(documents, bpe_vocab_size))


def from_tiktoken(name: str, remedy: str) -> Tokenizer:
    """Raises UserError, with another `remedy` besides filling tiktoken's cache, where the encoding is not at hand."""
    try:
        return Tokenizer.from_encoding(tiktoken.get_encoding(name))
    except Exception as error:  # tiktoken passes on whatever its download raised
        raise UserError(
            f"the vocabulary of {name} is not in tiktoken's cache and could not be fetched ({type(error).__name__}); "
            f"connect once, set TIKTOKEN_CACHE_DIR to a filled cache, or {remedy}"
        ) from None
