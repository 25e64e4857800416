"""What the tokenizers of libraries share: what they put around a text, names of special tokens in it, where a part of
it lies in its tokens, and what becomes of a panic of code in Rust."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from dtgpt.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError

# What ends a document, where nothing else says so.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
Span = tuple[int, int]  # of characters
SHOWN = 3  # names in a message


class LibraryTokenizer(Tokenizer):
    """One that may put ids before and behind every text. It can be pickled, so that workers need not read files
    again."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the libraries' objects, which are made again when they are used."""
        made = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in made}

    def encode_prompt(self, text: str, split_special_tokens: bool = False) -> list[int]:
        """Return the ids of a prompt that transformers' tokenizer gives. A text that begins with what is put before
        every text, as a rendered chat may, does not get it twice."""
        opening, ids = self._around[0], self.encode(text) if split_special_tokens else self._encode_named(text)
        twice = opening and ids[: 2 * len(opening)] == 2 * opening
        return ids[len(opening) :] if twice else ids

    def encode_bare(self, text: str) -> list[int]:
        (opening, closing), ids = self._around, self._encode_named(text)
        return ids[len(opening) : len(ids) - len(closing)]

    def warn_of_names(self, texts: Iterable[str], remedy: str) -> None:
        if self.special_names:
            warn_of_split_names(SpecialNames(self).count(texts), self, remedy)

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


def encode_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray]:
    """Return the ids of a text in which names of special tokens stand for these and nothing is added, and which of them
    have characters of `spans`, bool `[tokens]`. Raise UserError where the tokenizer cannot say that."""
    if hasattr(tokenizer, "encode_spans"):
        return tokenizer.encode_spans(text, spans)
    if not tokenizer.special_names:
        raise UserError(
            f"the tokenizer {tokenizer.name} does not read the names of special tokens, as chats need; use a "
            "tokenizer.json"
        )
    return spans_of_bytes(tokenizer, tokenizer.encode(text, special=True), text, spans)


def spans_of_bytes(
    tokenizer: Tokenizer, ids: list[int], text: str, spans: Sequence[Span]
) -> tuple[list[int], np.ndarray]:
    """Return `ids`, each of which stands for bytes of the text, and which of them have characters of `spans`."""
    stops = np.cumsum([len(tokenizer.bytes_of(i) or b"") for i in ids])
    characters = np.cumsum((np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80)  # up to each byte
    begins = np.concatenate([[0], stops[:-1]])[: len(ids)].astype(np.int64)
    offsets = np.stack([characters[begins] - 1, characters[stops.astype(np.int64) - 1]], 1)
    return ids, overlapping(offsets, spans)


def overlapping(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return which tokens lie in spans, from the first to the last that has a character of it: bool `[tokens]`.
    offsets: `[tokens, 2]`, where each token begins and ends."""
    found = np.zeros(len(offsets), bool)
    for begin, end in spans:
        places = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
        if len(places):
            found[places[0] : places[-1] + 1] = True
    return found


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
