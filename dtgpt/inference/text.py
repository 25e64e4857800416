"""Text of generated tokens, piece by piece: decoding, stop strings, and the ids that stop rules look for."""

import codecs
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.errors import UserError, shown

MOST_STOP_STRINGS, LONGEST_STOP_STRING = 16, 256  # characters
BROKEN = "\ufffd"  # in place of bytes that are not UTF-8
EACH_BYTE = "dtgpt.each_byte"  # SentencePiece's rule, and that of Hugging Face's libraries: one for each wrong byte
codecs.register_error(EACH_BYTE, lambda error: (BROKEN * (error.end - error.start), error.end))  # type: ignore
HELD = 3  # tokens that may be the beginning of a character, which has up to four bytes
WINDOW = 64  # tokens before the next ones, at most


class TextStream:
    """The text of ids that arrive one after the other.

    All pieces together are the text that the ids add to that of `prompt`, which ends with a whole character. So does
    each piece: bytes that later ones may complete are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        plain = tokenizer.bytes_of(0) is not None
        self._decoder: _Bytes | _DecodeWindow = _Bytes(tokenizer) if plain else _DecodeWindow(tokenizer)
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


class _DecodeWindow:
    """Decode tokens by a library, each behind some that came before it: a library may drop the blank at the beginning
    of a text. Tokens that are single bytes are decoded here: a library makes all of a run of them U+FFFD where one is
    wrong, so that nothing of the run would be certain before its end.

    `_ids[: _done]` is the beginning of the window, whose text `_shown` was returned before. What is behind is held.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done, self._shown = 0, ""
        self._held = b""  # of a character that is not complete, from bytes behind all of `_ids`

    def skip(self, prompt: Sequence[int]) -> None:
        self._ids = list(prompt[-WINDOW:])
        self._done, self._shown = len(self._ids), self._tokenizer.decode(self._ids)

    def extend(self, ids: Sequence[int]) -> str:
        pieces, byte_of = [], self._tokenizer.byte_of
        for are_bytes, group in groupby(ids, lambda i: byte_of(i) is not None):
            run = [*group]
            pieces.append(self._add_bytes(run) if are_bytes else self._end_bytes() + self._add(run))
        return "".join(pieces)

    def finish(self) -> str:
        return self._end_bytes() + self._advance(len(self._ids))

    def _add_bytes(self, ids: list[int]) -> str:
        before = self._advance(len(self._ids))
        found = self._held + bytes(byte for i in ids if (byte := self._tokenizer.byte_of(i)) is not None)
        text, read = codecs.utf_8_decode(found, EACH_BYTE)
        self._held = found[read:]
        self._move(ids, [])
        return before + text

    def _end_bytes(self) -> str:
        held, self._held = self._held, b""
        return BROKEN * len(held)

    def _add(self, ids: list[int]) -> str:
        """Add ids that are not bytes, of which the last HELD may be parts of a character all the same."""
        before, self._ids = len(self._ids), [*self._ids, *ids]
        end = len(self._ids)
        for certain in range(end, max(before, end - HELD), -1):
            if not self._tokenizer.decode(self._ids[:certain]).endswith(BROKEN):
                return self._advance(certain)
        return self._advance(max(self._done, end - HELD))

    def _advance(self, end: int) -> str:
        """Return what `_ids[:end]` adds to the text."""
        if end == self._done:
            return ""
        piece = self._tokenizer.decode(self._ids[:end])[len(self._shown) :]
        new, rest, self._ids = self._ids[self._done : end], self._ids[end:], self._ids[: self._done]
        self._move(new, rest)
        return piece

    def _move(self, new: list[int], rest: list[int]) -> None:
        """Let the window begin with `new` ids; behind others where they are not visible and a library might still drop
        a blank."""
        new = new[-WINDOW:]
        if not self._tokenizer.decode(new).strip():
            new = [*self._ids, *new] if len(self._ids) < WINDOW else self._ids
        self._ids, self._done, self._shown = [*new, *rest], len(new), self._tokenizer.decode(new)


class StopSearch:
    """Search for stop strings in a text that arrives in pieces; where the text ends does not depend on how it is cut.

    The match that is complete first ends the text; of several that end together, the longest. The text ends before a
    match of `strings`, and behind one of `endings`.
    """

    def __init__(self, strings: Sequence[str] = (), endings: Sequence[str] = ()):
        self._endings, self.strings = tuple(endings), (*strings, *endings)
        self._held = ""
        self.found = False

    def add(self, piece: str, ends: bool = True) -> str:
        """Return the text that no stop string can contain. `found`: whether the text ends behind it. `ends`: a match
        that is complete with this piece ends the text; else it is text as any other."""
        text = self._held + piece
        places = self._matches(text)
        if places and ends:
            end, start, stop = min(places)
            self.found, self._held = True, ""
            return text[: end if stop in self._endings else start]
        kept = max((_overlap(text, stop) for stop in self.strings), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def ends(self, piece: str) -> bool:
        """Return whether the text ends within `piece`, which is not added."""
        return bool(self._matches(self._held + piece))

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """Return (end, start, string) of the first match of each string that ends behind what is held."""
        found = ((stop, text.find(stop, max(0, len(self._held) + 1 - len(stop)))) for stop in self.strings)
        return [(start + len(stop), start, stop) for stop, start in found if start >= 0]

    def finish(self) -> str:
        """Return what was held back because it could have become a match."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raise UserError where there are too many stop strings, or one of them is empty or too long."""
    if len(strings) > MOST_STOP_STRINGS:
        raise UserError(f"{len(strings)} stop strings are too many; use up to {MOST_STOP_STRINGS}")
    for stop in strings:
        if not isinstance(stop, str) or not 1 <= len(stop) <= LONGEST_STOP_STRING:
            raise UserError(
                f"the stop string {shown(stop)} is not a text of 1 to {LONGEST_STOP_STRING} characters; change it"
            )


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
    """Return the text of each token alone, as Megatron-LM's server does: a character that two tokens share shows as
    U+FFFD in both."""
    return [tokenizer.decode([i]) for i in ids]
