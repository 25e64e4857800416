"""Byte-level BPE, which tiktoken encodes: several times faster than `tokenizers`, the same ids."""

import base64
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, groupby
from typing import Any

import numpy as np
import tiktoken

from dtgpt.data.library_tokenizers.base import ENDS, LibraryTokenizer, Span, panics_as_user_errors, spans_of_bytes
from dtgpt.data.tokenizers.open import FILES
from dtgpt.data.tokenizers.tokenizer import END_OF_TEXT, MOST
from dtgpt.util.errors import UserError
from dtgpt.util.shared.optional import optional_package

# GPT-2's pre-tokenization (Radford et al. 2019): contractions, words, numbers, other signs, white space.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# The same as tiktoken writes it.
PATTERNS = (PATTERN, r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""")
LONGEST_RUN = 2000  # characters
LONG = 100_000  # characters of a text that may have a run of blanks which tiktoken cannot split
SMALLEST = 257  # 256 bytes and the end of text
MARKS = re.compile(r"[^\w\x00-\x7f]{64,}")  # runs that may be of combining marks


class ByteLevel(LibraryTokenizer):
    """Byte-level BPE. `ranks`: the bytes of each token by id, b"" for an id that is special or not in use; without
    `specials` (ids by name) the id after the last is END_OF_TEXT. `ends`: names of the token that ends a document, the
    likeliest first. `vocab_size` and `num_tokens` where other ids or fewer than these count. `begin`: the name of the
    begin of text, which `encode` puts before each text where `opens` is set. `composed`: texts are brought into
    Unicode's form NFC before they are encoded."""

    def __init__(
        self, name: str, pattern: str, ranks: list[bytes], specials: dict[str, int] | None = None,
        ends: tuple[str, ...] = ENDS, vocab_size: int = 0, num_tokens: int | None = None, begin: str | None = None,
        opens: bool = False, composed: bool = False,
    ):  # fmt: skip
        self.name, self.pattern, self.ranks = name, pattern, ranks
        self.specials = {END_OF_TEXT: len(ranks)} if specials is None else specials
        self.vocab_size = max(len(ranks), vocab_size, *(i + 1 for i in self.specials.values()), 0)
        used = len(set(self.specials.values())) + sum(map(bool, ranks))
        self.num_tokens = used if num_tokens is None else num_tokens
        self.end_name = next((end for end in ends if end in self.specials), None)
        self.end_of_text = None if self.end_name is None else self.specials[self.end_name]
        self.begin_name, self.composed = begin, composed
        self.begin_of_text = None if begin is None else self.specials[begin]
        self.first = [self.begin_of_text] if opens and self.begin_of_text is not None else []

    @classmethod
    def from_encoding(cls, encoding: tiktoken.Encoding) -> "ByteLevel":
        """Make a tokenizer of one of tiktoken's own encodings."""
        specials = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        ids = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
        made = cls(encoding.name, encoding._pat_str, by_id(ids), specials)
        made._encoding = encoding
        return made

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "ByteLevel":
        """Return the tokenizer of which `to_json` wrote `saved`. Raise ValueError or KeyError where it is damaged."""
        made = cls._of_fields(saved)
        with panics_as_user_errors(made.name):
            made.encode("")  # a pattern that is none is found here and not in the middle of the work
        return made

    @classmethod
    def _of_fields(cls, saved: dict[str, Any]) -> "ByteLevel":
        ranks = [base64.b64decode(token, validate=True) for token in saved["ranks"]]
        if "specials" not in saved:  # of an older run
            return cls(saved["name"], saved["pattern"], ranks)
        ends = (saved["end"],) if saved["end"] is not None else ()
        sizes = saved["vocab_size"], saved["num_tokens"]
        if not all(is_id(size) for size in (*sizes, *saved["specials"].values())):
            raise ValueError(f"its ids and sizes must be in 0 to {MOST - 1}")
        rare = {name: saved[name] for name in ("begin", "opens", "composed") if name in saved}
        return cls(saved["name"], saved["pattern"], ranks, saved["specials"], ends, *sizes, **rare)

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        ids = {token: i for i, token in enumerate(self.ranks) if token}
        return tiktoken.Encoding(self.name, pat_str=self.pattern, mergeable_ranks=ids, special_tokens=self.specials)

    @cached_property
    def merges(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The list of merges that makes the tokens, and whether some are made only as whole words."""
        from dtgpt.data.library_tokenizers.merges import merges_of

        return merges_of({token: i for i, token in enumerate(self.ranks) if token})

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Raise UserError for a text with a run of about a million blanks."""
        text = self._normalized(text)
        with self._failures_as_user_errors():
            if not special and len(text) < LONG:
                return [*self.first, *self._encoding.encode_ordinary(text)]
            # A run that is too long is then an error, while `encode_ordinary` panics, and writes that to stderr.
            allowed: Any = "all" if special else set()
            return [*self.first, *self._encoding.encode(text, allowed_special=allowed, disallowed_special=())]

    def encode_batch(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        allowed = set(self.specials) if special else frozenset()
        with self._failures_as_user_errors():
            encode, given = self._encoding.encode_to_numpy, map(self._normalized, texts)
            ids = [encode(text, allowed_special=allowed, disallowed_special=()) for text in given]
        first = np.array(self.first, np.uint32)
        return [np.concatenate([first, own]) for own in ids] if self.first else ids

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray]:
        if self.composed:
            spans = [(len(self._normalized(text[:begin])), len(self._normalized(text[:end]))) for begin, end in spans]
            text = self._normalized(text)
        with self._failures_as_user_errors():
            ids = self._encoding.encode(text, allowed_special="all", disallowed_special=())
        return spans_of_bytes(self, ids, text, spans)

    @property
    def special_names(self) -> Collection[str]:
        return self.specials

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize("NFC", MARKS.sub(_in_order, text)) if self.composed else text

    @contextmanager
    def _failures_as_user_errors(self) -> Iterator[None]:
        """Tell in one sentence that a library fails: it steps back through a run of blanks, within limits."""
        try:
            with panics_as_user_errors(self.name):
                yield
        except ValueError:
            raise UserError(
                f"the text has a run of blanks that is too long for the tokenizer {self.name}; shorten the run"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def bytes_of(self, i: int) -> bytes:
        known = self.ranks[i] if i < len(self.ranks) else b""
        return known or self._names.get(i, b"\xff")

    @cached_property
    def _names(self) -> dict[int, bytes]:
        return {i: name.encode() for name, i in self.specials.items()}

    def token_bytes(self) -> np.ndarray:
        sizes = list(map(len, self.ranks))
        return np.array(sizes + [0] * (self.vocab_size - len(sizes)), np.int64)

    def to_json(self) -> dict[str, Any]:
        rare = {"begin": self.begin_name, "opens": bool(self.first), "composed": self.composed}
        return {
            "name": self.name, "pattern": self.pattern, "specials": self.specials, "end": self.end_name,
            "vocab_size": self.vocab_size, "num_tokens": self.num_tokens,
            **{name: value for name, value in rare.items() if value},
            "ranks": [base64.b64encode(token).decode() for token in self.ranks],
        }  # fmt: skip


def _in_order(run: re.Match) -> str:
    """Return a run of characters that has the same normal form, with combining marks in its order already: Python sorts
    them in time that grows with the square of their number."""
    parts = "".join(unicodedata.normalize("NFD", character) for character in run[0])
    groups = (list(own) for _, own in groupby(parts, lambda character: unicodedata.combining(character) > 0))
    return "".join(chain.from_iterable(sorted(own, key=unicodedata.combining) for own in groups))


def by_id(ids: dict[bytes, int]) -> list[bytes]:
    """Return the bytes of each id, b"" where there are none."""
    ranks = [b""] * (max(ids.values(), default=-1) + 1)
    for token, i in ids.items():
        ranks[i] = token
    return ranks


def letter_bytes() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable Latin-1 letters stand for themselves, the other bytes for U+0100 and
    up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def is_id(value: object) -> bool:
    """Return whether `value` is a token's id; a larger one would claim memory for all the ids below it."""
    return type(value) is int and 0 <= value < MOST


def encoding_names() -> list[str]:
    """Return the names of tiktoken's encodings."""
    return tiktoken.list_encoding_names()


def from_tiktoken(name: str) -> ByteLevel:
    """Open one of tiktoken's encodings, from its cache, or fetched by it once. Raises UserError if it is not at
    hand."""
    try:
        return ByteLevel.from_encoding(tiktoken.get_encoding(name))
    except Exception as error:  # tiktoken passes on any exception of its download
        raise UserError(
            f"the vocabulary of {name} is not in tiktoken's cache and could not be fetched ({type(error).__name__}); "
            f"connect once, set TIKTOKEN_CACHE_DIR to a filled cache, give {FILES}, or use another tokenizer"
        ) from None


def train_ranks(documents: Iterable[str], vocab_size: int) -> list[bytes]:
    """Return the bytes of each token by id, with GPT-2's pre-tokenization; at most `vocab_size` with the end of text,
    which is not among them. Raise UserError where that is too small or the package is missing."""
    if vocab_size < SMALLEST:
        raise UserError(f"data.bpe_vocab_size={vocab_size} is too small; a byte-level BPE needs {SMALLEST} or more")
    library = optional_package("tokenizers", "training a BPE (which the tokenizer bytes does without)")
    trainable = library.Tokenizer(library.models.BPE())
    trainable.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = letter_bytes()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=list(letters), show_progress=False
    )
    trainable.train_from_iterator((piece for d in documents for piece in _pieces(d)), trainer)
    # tokenizers numbers the 256 byte letters first and then the merges in their order: just tiktoken's ranks.
    vocabulary = trainable.get_vocab()
    return [bytes(letters[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def _pieces(document: str) -> list[str]:
    """Return the document, cut where a run of letters or blanks is so long that merging it would take hours."""
    if not re.search(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}", document):
        return [document]
    return re.findall(rf"\s{{1,{LONGEST_RUN}}}\S{{0,{LONGEST_RUN}}}|\S{{1,{LONGEST_RUN}}}", document)
