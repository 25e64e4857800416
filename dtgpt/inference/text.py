"""Text of generated tokens, piece by piece: decoding, and the ids that stop rules look for."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util import seams
from dtgpt.util.errors import UserError


class TextDecoder(Protocol):
    """How ids that arrive one after the other become text: what a capability has at the seam `text_decoders`, for
    tokens whose text depends on those around them. Its attributes are replaced, and never changed in place."""

    def skip(self, prompt: Sequence[int]) -> None:
        """Take the ids behind which the others come."""

    def extend(self, ids: Sequence[int]) -> str:
        """Return the text that is certain with these ids."""

    def finish(self) -> str:
        """Return the rest, in which U+FFFD stands for an incomplete character."""


class TextStream:
    """The text of ids that arrive one after the other.

    All pieces together are the text that the ids add to that of `prompt`, which ends with a whole character. So does
    each piece: bytes that later ones may complete are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._decoder = _decoder_of(tokenizer)
        self._decoder.skip([i for i in prompt if i < tokenizer.vocab_size])  # a model may have more tokens

    def add(self, i: int) -> str:
        """Return the text that is certain with this id."""
        return self._decoder.extend([i])

    def extend(self, ids: Sequence[int]) -> str:
        """Return what `add` of each id would return, joined; decoding is called once, not once an id."""
        return self._decoder.extend(ids)

    def finish(self) -> str:
        """Return the rest, in which U+FFFD stands for an incomplete character."""
        return self._decoder.finish()

    def mark(self) -> dict[str, Any]:
        """Return what `go_back` needs to come back to this place."""
        return dict(vars(self._decoder))  # decoders replace what they hold; they change none of it in place

    def go_back(self, mark: dict[str, Any]) -> None:
        """Forget the ids since a mark."""
        vars(self._decoder).update(mark)


def _decoder_of(tokenizer: Tokenizer) -> TextDecoder:
    if tokenizer.bytes_of(0) is not None:  # each token is the same bytes in every text
        return _Bytes(tokenizer)
    for decoder in seams.listed("text_decoders"):
        return decoder(tokenizer)
    raise UserError(f"the tokenizer {tokenizer.name} has no text for single tokens; use one that dtgpt trains")


class _Bytes:
    """Decode tokens that are bytes, whatever is around them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._held = b""  # of a character that is not complete

    def skip(self, prompt: Sequence[int]) -> None:
        self.extend(prompt[-4:])  # a character has up to four bytes

    def extend(self, ids: Iterable[int]) -> str:
        bytes_of = self._tokenizer.bytes_of
        found = b"".join([self._held, *(bytes_of(i) or b"" for i in ids)])
        text, read = codecs.utf_8_decode(found, "replace")
        self._held = found[read:]
        return text

    def finish(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


def token_of(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the token that spells `text` within other text; None where no single token does."""
    for before in ("a", ""):
        try:
            opening, ids = tokenizer.encode(before), tokenizer.encode(before + text)
        except UserError:  # a vocabulary of characters, without one of these
            continue
        same = ids[:-1] == opening and TextStream(tokenizer, opening).add(ids[-1]) == text
        return ids[-1] if same else None
    return None


def segments(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return the text of each token alone: a character that two tokens share shows as U+FFFD in both."""
    return [tokenizer.decode([i]) for i in ids]
