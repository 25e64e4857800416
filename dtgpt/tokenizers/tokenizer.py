"""Byte-level BPE tokenizers, encoded by tiktoken, saved as plain JSON.

* `bpe`: trained on the text at hand with Hugging Face's `tokenizers`, then handed to tiktoken (same ids, faster).
* `gpt2`: GPT-2's own 50257 tokens, as tiktoken carries them (from its cache, or fetched by it once).
* `bytes`: the 256 bytes.
Each has one special token, `<|endoftext|>`, that ends a document. The same string inside a text is plain text.
"""

import base64
import json
import re
from pathlib import Path

import numpy as np
import tiktoken

from dtgpt.errors import UserError
from dtgpt.storage import write_text

END_OF_TEXT = "<|endoftext|>"
# GPT-2's pre-tokenization (Radford et al. 2019): contractions, words, numbers, other signs, white space.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LONGEST_RUN = 2000  # characters
SMALLEST = 257  # 256 bytes and the end of text


class Tokenizer:
    """Text <-> ids. `ranks`: the bytes of each token by id; the id after the last is END_OF_TEXT."""

    def __init__(self, name: str, pattern: str, ranks: list[bytes]):
        self.name, self.pattern, self.ranks = name, pattern, ranks
        self.end_of_text = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            name,
            pat_str=pattern,
            mergeable_ranks={token: i for i, token in enumerate(ranks)},
            special_tokens={END_OF_TEXT: self.end_of_text},
        )

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self._encoding.decode(ids, errors="replace")

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 `[vocab_size]`; the end of text stands for none."""
        return np.array([len(token) for token in self.ranks] + [0])

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """All documents, END_OF_TEXT after each, as one uint16 or int32 array."""
        ids = [np.array([*self.encode(d), self.end_of_text]) for d in documents]
        return np.concatenate(ids or [np.array([])]).astype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def save(self, path: Path) -> None:
        ranks = [base64.b64encode(token).decode() for token in self.ranks]
        write_text(path, json.dumps({"name": self.name, "pattern": self.pattern, "ranks": ranks}))

    @classmethod
    def load(cls, path: Path, remedy: str) -> "Tokenizer":
        """The tokenizer that `save` wrote; raises UserError, with `remedy`, where the file is not that."""
        try:
            saved = json.loads(path.read_text())
            return cls(saved["name"], saved["pattern"], [base64.b64decode(token) for token in saved["ranks"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); {remedy}") from None


def make_tokenizer(
    kind: str, documents: list[str], bpe_vocab_size: int, vocab_file: str | None = None, merge_file: str | None = None
) -> Tokenizer:
    """The tokenizer `kind` ("bpe", "gpt2" or "bytes"); only "bpe" looks at the documents. "gpt2": from its files, or as
    tiktoken carries it."""
    if kind == "gpt2" and vocab_file is not None:
        return _from_files(vocab_file, merge_file)
    if kind == "gpt2":
        return _gpt2()
    if kind == "bytes":
        return Tokenizer("bytes", PATTERN, [bytes([b]) for b in range(256)])
    return _train_bpe(documents, bpe_vocab_size)


def _gpt2() -> Tokenizer:
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever its download raised
        raise UserError(
            f"GPT-2's vocabulary is not in tiktoken's cache and could not be fetched ({type(error).__name__}); connect "
            "once, set TIKTOKEN_CACHE_DIR to a filled cache, or use --data.tokenizer bpe"
        ) from None
    return Tokenizer("gpt2", PATTERN, [encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)])


def _from_files(vocab_file: str, merge_file: str) -> Tokenizer:
    """A byte-level BPE like GPT-2's, whose last id is END_OF_TEXT."""
    from dtgpt.tokenizers.vocabulary import ByteLevel, from_files

    vocabulary = from_files(Path(vocab_file), Path(merge_file))
    ranks = vocabulary.ranks() if isinstance(vocabulary, ByteLevel) else []
    if vocabulary.end_of_text != len(ranks) or vocabulary.vocab_size != len(ranks) + 1:
        raise UserError(
            f"{vocab_file} and {merge_file} are no vocabulary like GPT-2's: bytes, merges, then {END_OF_TEXT}; give "
            "its vocab.json and merges.txt"
        )
    return Tokenizer("gpt2", PATTERN, ranks)


def _train_bpe(documents: list[str], vocab_size: int) -> Tokenizer:
    if vocab_size < SMALLEST:
        raise UserError(f"data.bpe_vocab_size={vocab_size} is too small; a byte-level BPE needs {SMALLEST} or more")
    try:
        from tokenizers import Tokenizer as Trainable
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError(
            "training a BPE needs the package tokenizers; run pip install 'dtgpt[data]', or use --data.tokenizer bytes"
        ) from None
    trainable = Trainable(models.BPE())
    trainable.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainable.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    trainable.train_from_iterator((piece for d in documents for piece in _pieces(d)), trainer)
    # tokenizers numbers the 256 byte letters first and then the merges in their order: just tiktoken's ranks.
    letters = _letter_bytes()
    by_id = sorted(trainable.get_vocab().items(), key=lambda item: item[1])
    return Tokenizer("bpe", PATTERN, [bytes(letters[c] for c in token) for token, _ in by_id])


def _pieces(document: str) -> list[str]:
    """The document for training; cut where one run of letters or blanks is so long that merging it would take hours."""
    if not re.search(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}", document):
        return [document]
    return re.findall(rf"\s{{1,{LONGEST_RUN}}}\S{{0,{LONGEST_RUN}}}|\S{{1,{LONGEST_RUN}}}", document)


def _letter_bytes() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 letters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
