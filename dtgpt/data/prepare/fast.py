"""Encoding by fastokens, several times as fast as the library that defines a tokenizer's ids, where it is installed.

Its ids must be those of that library, or a model would be trained on another vocabulary than its users' texts are
encoded by. Hence both encode texts that such programs cut in different ways, and the first megabytes of each input;
where one id differs, the defining library encodes all."""

import os
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from dtgpt.data.library_tokenizers.base import panics_as_user_errors
from dtgpt.data.library_tokenizers.byte_level import ByteLevel
from dtgpt.data.library_tokenizers.export import PROBES, tokenizer_json_of
from dtgpt.data.library_tokenizers.libraries import TokenizerJson
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown

SHOWN = 20  # characters before those whose ids differ
WIDE = ("\U00030000", "\U0003134a", "\U000e0041", "\U000f0000", "\U0010fffd")  # of planes 3 to 16
HOSTILE = (
    *PROBES,
    *(f"{left}{sign}'{end} {sign}" for sign in WIDE for left in ("", " ", "a") for end in ("m", "t", "s", "ll", "re")),
    "'M 'LL \u017f'\u017f it'\u017f 'S'm'T",  # \u017f is an s where case does not matter
    "a\u0308\u0323 A\u030a \u212b \u1e9b\u0323 \uac01\u11a8 \ufb01 \u0958",  # which NFC changes
    "\u0660\u06f1\u0967 \u2167 \u00bd\u00b2 1\u0661a \u3007\u4e00",
    "\u00a0\u1680 \u2003\u202f \u205f\u3000\x0b\x0c\x1c\x85\u180e\u200b a \u2028b\u2029",
    "\r\n\r \n\t \n  \n\n x \r\n",
    "\x00\x01\x7f\ufeff\ufffe\uffff\U0001ffff",
    "".join(map(chr, range(0x2000, 0x2100))),
)


@dataclass(frozen=True)
class Fast:
    """fastokens' tokenizer of a tokenizer.json; in another process it is made again."""

    content: str

    @cached_property
    def _library(self) -> Any:
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # prepare has its own processes
        from fastokens import Tokenizer

        return Tokenizer.from_json_str(self.content)

    def encode_batch(self, texts: list[str], special: bool) -> list[np.ndarray]:
        """Return the ids of each text, uint32 `[tokens]`. Raises what the package does, and UserError for a panic."""
        with panics_as_user_errors("of fastokens"):
            flat, offsets = self._library.encode_batch_flat(texts, True, not special)
        ids, bounds = np.frombuffer(flat, np.uint32), np.frombuffer(offsets, np.uint64).tolist()
        return [ids[begin:end] for begin, end in pairwise(bounds)]

    def encode_named(self, text: str) -> np.ndarray:
        """Return the ids of a text, uint32 `[tokens]`, in which names of special tokens stand for these, and nothing is
        added. Raises as `encode_batch`."""
        with panics_as_user_errors("of fastokens"):
            return np.frombuffer(self._library.encode_batch_flat([text], False, False)[0], np.uint32)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Fast, (self.content,)


def is_known(vocabulary: Tokenizer) -> bool:
    """Return whether fastokens may know tokenizers of this kind."""
    return isinstance(vocabulary, ByteLevel | TokenizerJson)


def is_installed() -> bool:
    return find_spec("fastokens") is not None


def fast_for(vocabulary: Tokenizer, texts: list[str], special: bool) -> Fast | None:
    """Return fastokens' tokenizer; None where it cannot be made, or gives other ids to one of the texts, beside those
    of HOSTILE, which is said."""
    names = vocabulary.added_names if isinstance(vocabulary, TokenizerJson) else vocabulary.special_names
    texts = [*HOSTILE, *names, *(f"a{name} {name}b\n" for name in names), *texts]
    library = "tiktoken" if isinstance(vocabulary, ByteLevel) else "tokenizers"
    instead = f"{library}, which is slower, encodes the texts"
    try:
        expected = vocabulary.encode_batch(texts, special)
    except UserError:  # of a probe; if it is of the input, it is said where that is encoded
        return None
    try:
        fast = Fast(tokenizer_json_of(vocabulary))
        found = fast.encode_batch(texts, special)
    except Exception as error:  # the package raises plain ones
        reason = str(error).partition("\n")[0] or type(error).__name__
        say(f"fastokens does not encode by the tokenizer {vocabulary.name} ({reason}); {instead}", warning=True)
        return None
    for text, own, theirs in zip(texts, expected, found, strict=True):
        if not np.array_equal(own, theirs):
            where = shown(_differing(vocabulary, text, own, theirs))
            say(f"fastokens gives other ids than {vocabulary.name} to {where}; {instead}", warning=True)
            return None
    return fast


def _differing(vocabulary: Tokenizer, text: str, own: np.ndarray, theirs: np.ndarray) -> str:
    """Return the part of a text behind which ids differ."""
    both = min(len(own), len(theirs))
    same = int(np.flatnonzero(np.append(own[:both] != theirs[:both], True))[0])
    begin = len(vocabulary.decode(own[:same]))
    return text[max(begin - SHOWN, 0) : begin + SHOWN]
