"""Chats encoded by fastokens where it is installed. It does not say where a token lies in the text; of tokens that
spell bytes this follows from their lengths. A chat of which it does not, and one whose answers begin or end within a
token with a blank at its edge, which a library may count out, is encoded by the library that defines the ids. So are
all, where the first chats get other ids or other weights."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from dtgpt.data.library_tokenizers.base import Span, overlapping
from dtgpt.data.library_tokenizers.libraries import TokenizerJson
from dtgpt.data.prepare.encode import COMPARED, MOST_BLOCKS
from dtgpt.data.prepare.fast import Fast, fast_for, is_installed
from dtgpt.data.prepare.inputs import Lines, Parsed
from dtgpt.util.console import say

WORTHWHILE = 1 << 24  # bytes of inputs; of fewer, the comparison takes longer than the library saves


@dataclass(frozen=True)
class FastSpans:
    """What `encode_spans` of `vocabulary` gives, in less time."""

    vocabulary: TokenizerJson
    fast: Fast

    @property
    def special_names(self) -> Collection[str]:
        return self.vocabulary.special_names

    @cached_property
    def _spelled(self) -> list[bytes]:
        """The bytes of each id."""
        return [self.vocabulary.bytes_of(i) or b"" for i in range(self.vocabulary.vocab_size)]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray]:
        found = self._encode(text, spans)
        return self.vocabulary.encode_spans(text, spans) if found is None else found

    def _encode(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray] | None:
        """Return ids, and which of them have characters of the spans; None where that is not certain."""
        try:
            ids = self.fast.encode_named(text).tolist()
        except Exception:  # the defining library says what is wrong with a text
            return None
        pieces, content = list(map(self._spelled.__getitem__, ids)), text.encode()
        if not pieces or not all(pieces) or b"".join(pieces) != content:  # a normal form may be of equal length
            return None
        stops = np.cumsum(list(map(len, pieces)))
        characters = np.cumsum((np.frombuffer(content, np.uint8) & 0xC0) != 0x80)  # up to each byte
        begins = np.concatenate([[0], stops[:-1]])
        offsets = np.stack([characters[begins] - 1, characters[stops - 1]], 1)
        found = overlapping(offsets, spans)
        places = np.flatnonzero(np.diff(found.astype(np.int8), prepend=0, append=0))  # where runs begin, and after them
        edges = [pieces[i] for i in (*places[::2], *(places[1::2] - 1))]
        return None if any(each[:1] == b" " or each[-1:] == b" " for each in edges) else (ids, found)


@dataclass
class Compared:
    """Encodes chats both ways, and keeps in `differs` the text of one that gets something else."""

    fast: FastSpans
    characters: int = 0
    differs: list[str] = field(default_factory=list)

    @property
    def special_names(self) -> Collection[str]:
        return self.fast.special_names

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray]:
        ids, counts = self.fast.vocabulary.encode_spans(text, spans)
        theirs, weights = self.fast.encode_spans(text, spans)
        self.characters += len(text)
        if ids != theirs or not np.array_equal(counts, weights):
            self.differs.append(text)
        return ids, counts


def quicken(encoder: Any, blocks: Iterator[Lines | Parsed]) -> tuple[Any, Iterator[Lines | Parsed]]:
    """Return an encoder to the same tokens by fastokens, where that can be had, and all the blocks, of which some are
    read before. encoder: a `ChatEncoder`. Raises UserError where inputs cannot be read."""
    vocabulary = encoder.vocabulary
    if not isinstance(vocabulary, TokenizerJson) or vocabulary.bytes_of(0) is None or not is_installed():
        return encoder, blocks
    first: list[Lines | Parsed] = []
    size = 0
    for block in blocks:
        first.append(block)
        size += len(block.data) if isinstance(block, Lines) else 0
        if size >= COMPARED or len(first) == MOST_BLOCKS:
            break
    else:
        return encoder, iter(first)  # too few to compare
    fast = fast_for(vocabulary, [], special=True)
    if fast is None:
        return encoder, chain(first, blocks)
    compared = Compared(FastSpans(vocabulary, fast))
    both = replace(encoder, fast=compared)
    try:
        for block in first:
            both(block)
            if compared.differs or compared.characters >= COMPARED:
                break
    finally:
        both.close()
    if compared.differs:
        say("fastokens gives other tokens to a chat; tokenizers, which is slower, encodes the chats", warning=True)
        return encoder, chain(first, blocks)
    return replace(encoder, fast=compared.fast), chain(first, blocks)
