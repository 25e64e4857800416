"""What every tokenizer can do.

A run carries its tokenizer with it: `save` writes plain JSON from which `open.read_saved` makes it again, without the
files that it once came from. A tokenizer can be pickled, so that workers need not read files again. Names of special
tokens in texts, such as a rendered chat has, are text as any other unless they are asked for."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import write_text

END_OF_TEXT = "<|endoftext|>"
# What ends a document, where nothing else says so.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
MOST = 1 << 24  # ids
Span = tuple[int, int]  # of characters
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the libraries' objects, which are made again when they are used."""
        made = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in made}

    @property
    def opening(self) -> int | None:
        """Return the token that a generated text without a prompt follows: the end of the one before."""
        return self.end_of_text

    @property
    def special_names(self) -> Collection[str]:
        """Return the names of special tokens, which stand for these in a text or are text, as `encode` is told."""
        return ()

    def is_same(self, other: "Tokenizer") -> bool:
        """Return whether ids mean the same."""
        return (self.ranks, self.end_of_text) == (other.ranks, other.end_of_text)

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text. `special`: the names of special tokens in the text stand for these; else they are
        text as any other."""

    def encode_prompt(self, text: str, split_special_tokens: bool = False) -> list[int]:
        """Return the ids of a prompt, as transformers' tokenizer does: names of special tokens stand for these, unless
        they are to be split, and what this tokenizer puts before and behind every text is there. A text that begins
        with it, as a rendered chat may, does not get it twice."""
        opening, ids = self._around[0], self.encode(text) if split_special_tokens else self._encode_named(text)
        twice = opening and ids[: 2 * len(opening)] == 2 * opening
        return ids[len(opening) :] if twice else ids

    def encode_bare(self, text: str) -> list[int]:
        """Return the ids of a prompt without what this tokenizer puts before and behind every text."""
        (opening, closing), ids = self._around, self._encode_named(text)
        return ids[len(opening) : len(ids) - len(closing)]

    def _encode_named(self, text: str) -> list[int]:
        """Return the ids of a text in which names of special tokens stand for these."""
        return self.encode(text, self.names_special)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` puts before and behind every text."""
        if not (alone := self.encode("")):
            return [], []
        opening = [i for i, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, self.encode("a"), strict=False))]
        return opening, alone[len(opening) :]

    def encode_batch(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, uint32 `[tokens]`."""
        return [np.array(self.encode(text, special), np.uint32) for text in texts]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray]:
        """Return the ids of a text in which names of special tokens stand for these and nothing is added, and
        which of them have characters of `spans`, bool `[tokens]`. Raises UserError."""
        raise UserError(
            f"the tokenizer {self.name} does not read the names of special tokens, as chats need; use a tokenizer.json"
        )

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Return all documents, the end of text after each where there is one, as one uint16 or int32 array."""
        end = [] if self.end_of_text is None else [self.end_of_text]
        ids = [np.array([*self.encode(d), *end]) for d in documents]
        return np.concatenate(ids or [np.array([])]).astype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

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


def special_token(content: str, id_: int, special: bool = True) -> dict[str, Any]:
    """Return an entry of `added_tokens` in Hugging Face's format."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, **flags, "special": special}


def opening_template(name: str, id_: int) -> dict[str, Any]:
    """Return the post-processor in Hugging Face's format that opens each text with the token `name`."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]}},
    }


def overlapping(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return which tokens lie in spans, from the first to the last that has a character of it: bool `[tokens]`.
    offsets: `[tokens, 2]`, where each token begins and ends."""
    found = np.zeros(len(offsets), bool)
    for begin, end in spans:
        places = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
        if len(places):
            found[places[0] : places[-1] + 1] = True
    return found


def checksum(saved: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


@contextmanager
def panics_as_user_errors(name: str) -> Iterator[None]:
    """Tell a panic of a library in Rust, which is not even an Exception, in one sentence."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"the tokenizer {name} is damaged ({reason}); fetch or make it again") from None


SHOWN = 3  # names in a message


class SpecialNames:
    """Counts the names of a tokenizer's special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        names = sorted(filter(None, tokenizer.special_names), key=len, reverse=True)  # the longest that fits
        self._beginnings = {name[:2] for name in names}
        self._pattern = re.compile("|".join(map(re.escape, names)))

    def count(self, texts: Iterable[str]) -> Counter[str]:
        """Return how often each name is in the texts."""
        likely = (text for text in texts if any(beginning in text for beginning in self._beginnings))
        return Counter(name for text in likely for name in self._pattern.findall(text))


def warn_of_split_names(found: Counter[str], tokenizer: Tokenizer, remedy: str) -> None:
    """Say which names of special tokens became other tokens."""
    if not found:
        return
    most = ", ".join(f"{name}: {number:,}" for name, number in found.most_common(SHOWN))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    say(
        f"the texts have {counted(found.total(), 'name')} of special tokens of {tokenizer.name} ({most}{more}), which "
        f"became text, several tokens each; {remedy}",
        warning=True,
    )
