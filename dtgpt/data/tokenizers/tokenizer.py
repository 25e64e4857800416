"""What every tokenizer can do, and one that needs no library and no vocabulary: bytes.

Weights mean the ids of one tokenizer, so a run carries its own with it: `save` writes plain JSON from which
`open.read_saved` makes it again, without the files that it once came from. Names of special tokens in texts are text as
any other unless they are asked for: a text that a stranger wrote must not end a document."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dtgpt.data.text import paired
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import write_text

END_OF_TEXT = "<|endoftext|>"
MOST = 1 << 24  # ids
CHECKSUM = "sha256"  # of all else that `Tokenizer.save` writes


class Tokenizer(ABC):
    """Text <-> token ids. Ids are below `vocab_size`; `num_tokens` of them are in use. `end_of_text` and
    `begin_of_text` are None where unknown. `ranks` tells two tokenizers apart: the bytes of each token by id, or of
    all that the library reads which encodes. `additions`: what is kept with the tokenizer for others, by name, as JSON
    has it."""

    name: str
    vocab_size: int
    num_tokens: int
    end_of_text: int | None
    begin_of_text: int | None = None
    additions: Mapping[str, Any] = MappingProxyType({})
    ranks: list[bytes]
    spells = True  # whether text becomes tokens at all, and tokens text
    names_special = True  # whether `encode` may read the names of special tokens

    @property
    def opening(self) -> int | None:
        """Return the token that a generated text without a prompt follows: the end of the one before."""
        return self.end_of_text

    @property
    def special_names(self) -> Collection[str]:
        """Return the names of special tokens, which `encode` takes for these, or for text as any other."""
        return ()

    def is_same(self, other: "Tokenizer") -> bool:
        """Return whether ids mean the same."""
        return (self.ranks, self.end_of_text) == (other.ranks, other.end_of_text)

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text. `special`: the names of special tokens in the text stand for these; else they are
        text as any other."""

    def encode_prompt(self, text: str, split_special_tokens: bool = False) -> list[int]:
        """Return the ids of a prompt: names of special tokens stand for these, unless they are to be split. What a
        tokenizer puts before and behind every text is there, once."""
        return self.encode(text, self.names_special and not split_special_tokens)

    def encode_bare(self, text: str) -> list[int]:
        """Return the ids of a prompt without what a tokenizer puts before and behind every text."""
        return self.encode_prompt(text)

    def encode_batch(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, uint32 `[tokens]`."""
        return [np.array(self.encode(text, special), np.uint32) for text in texts]

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Return all documents, the end of text after each where there is one, as one uint16 or int32 array."""
        end = [] if self.end_of_text is None else [self.end_of_text]
        ids = [np.array([*self.encode(d), *end]) for d in documents]
        return np.concatenate(ids or [np.array([])]).astype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def warn_of_names(self, texts: Iterable[str], remedy: str) -> None:  # noqa: B027
        """Say which names of special tokens are in texts and become other tokens; of a kind that has none, nothing."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD. Raise UserError
        for an id that the tokenizer does not have."""
        ids = list(map(int, ids))
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{wrong} is not a token of {self.name}, which has ids 0 to {self.vocab_size - 1}; give the tokenizer "
                "that the tokens were made with"
            )
        return self._decode(ids)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def bytes_of(self, i: int) -> bytes | None:
        """Return the bytes that token `i` stands for in every text; None where they depend on the tokens around it."""
        return None

    def byte_of(self, i: int) -> int | None:
        """Return the byte that token `i` is, whose text depends on the bytes before and after it; None for a token that
        is no single byte, or where `bytes_of` says it."""
        return None

    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """Return how many bytes of text each id spells, int64 `[vocab_size]`; special tokens spell none. Where a
        library normalises text before it encodes, these are bytes of the normalised text."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    def dumps(self, with_additions: bool = True) -> str:
        """Return the text that `open.read_saved` reads, with a checksum: a bit that flips would give other ids."""
        saved = self.to_json() | (dict(self.additions) if with_additions else {})
        return json.dumps({**saved, CHECKSUM: checksum(saved)})

    def save(self, path: Path) -> None:
        write_text(path, self.dumps())


def check_opening(tokenizer: Tokenizer) -> None:
    """Raise UserError where a tokenizer of texts names no end of text."""
    if tokenizer.spells and tokenizer.opening is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} names no end of text, with which texts begin and end; name it as "
            'eos_token in a tokenizer_config.json beside a tokenizer.json, or train a .model with "</s>"'
        )


def checksum(saved: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


class Bytes(Tokenizer):
    """The 256 bytes, and an end of text: every text has ids, and training needs no vocabulary."""

    name = "bytes"
    num_tokens = vocab_size = 257
    end_of_text = 256
    special_names = (END_OF_TEXT,)

    def __init__(self) -> None:
        self.ranks = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str, special: bool = False) -> list[int]:
        first, *rest = paired(text).split(END_OF_TEXT) if special else [paired(text)]
        ids = list(first.encode())
        for piece in rest:
            ids += [self.end_of_text, *piece.encode()]
        return ids

    def warn_of_names(self, texts: Iterable[str], remedy: str) -> None:
        found = sum(text.count(END_OF_TEXT) for text in texts)
        if found:
            say(
                f"the texts have {counted(found, 'name')} of special tokens of {self.name} ({END_OF_TEXT}), which "
                f"became text, several tokens each; {remedy}",
                warning=True,
            )

    def _decode(self, ids: list[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def bytes_of(self, i: int) -> bytes:
        return END_OF_TEXT.encode() if i == self.end_of_text else bytes([i])

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int64)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.vocab_size}
