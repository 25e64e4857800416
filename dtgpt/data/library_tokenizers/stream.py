"""The text of ids that arrive one after the other, for tokenizers of libraries, which may decode a token in another way
behind others."""

import codecs
from collections.abc import Sequence
from itertools import groupby

from dtgpt.data.tokenizers.tokenizer import Tokenizer

BROKEN = "\ufffd"  # in place of bytes that are not UTF-8
EACH_BYTE = "dtgpt.each_byte"  # SentencePiece's rule, and that of Hugging Face's libraries: one for each wrong byte
codecs.register_error(EACH_BYTE, lambda error: (BROKEN * (error.end - error.start), error.end))  # type: ignore
HELD = 3  # tokens that may be the beginning of a character, which has up to four bytes
WINDOW = 64  # tokens before the next ones, at most


class DecodeWindow:
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
