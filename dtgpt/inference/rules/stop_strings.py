"""Stop strings: a text ends before the first of them that is complete, and with it the sequence of its tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtgpt.inference.base_options import SpecialIds

if TYPE_CHECKING:
    from dtgpt.inference.prompts import TextStream


class StopSearch:
    """Search for stop strings in a text that arrives in pieces; where the text ends does not depend on how it is cut.

    The match that is complete first ends the text; of several that end together, the longest. The text ends before a
    match of `strings`, and behind one of `endings`.
    """

    def __init__(self, strings: Sequence[str] = (), endings: Sequence[str] = (), least: int = 0):
        """least: tokens of a sequence that do not end it."""
        self._endings, self.strings, self._least = tuple(endings), (*strings, *endings), least
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
        kept = max((overlap(text, stop) for stop in self.strings), default=0)
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

    def read(self, stream: "TextStream", ids: Sequence[int], before: int) -> tuple[str, int]:
        """Return the text of ids, and how many of them there are up to the one that completes a stop string. before:
        the new tokens that the sequence has already."""
        mark, text = dict(vars(stream)), stream.extend(ids)
        if not self.ends(text):
            return self.add(text), len(ids)
        # Which token completes the string is seen only where each is decoded alone.
        vars(stream).update(mark)
        pieces: list[str] = []
        while not self.found and len(pieces) < len(ids):
            pieces.append(self.add(stream.extend([ids[len(pieces)]]), before + len(pieces) >= self._least))
        return "".join(pieces), len(pieces)

    def rest(self, text: str) -> str:
        """Return what is left of a text that ends with `text`."""
        return self.add(text) + self.finish()


def line_ends(options: Any, special: SpecialIds) -> tuple[str, ...]:
    """Return the texts behind which a rule of line ends stops, where the tokenizer has no token for them."""
    if special.newline is not None:
        return ()
    if options.stop_on_double_eol:
        return ("\n\n",)
    return ("\n",) if options.stop_on_eol else ()


def overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
