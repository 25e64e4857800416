"""A byte-level BPE as a vocabulary and a list of merges, and whether tiktoken would encode with it to the same ids.

BPE by the list merges the adjacent pair that stands first in it. tiktoken has no list: it merges the adjacent pair
whose union has the smallest id. The two agree where merges stand in the order of the ids they make, each token is made
by one merge only, and the tokens before it, merged by tiktoken's rule, leave of its bytes just the two of that merge.
(A merge of other two parts would need its bytes to be parted in that way in a text; but as long as nothing has merged
across its borders, what lies between them goes the same way as it does alone.)
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dtgpt.errors import UserError


class BytePairs(NamedTuple):
    """`ids` of tokens by their bytes, `specials` by their names."""

    ids: dict[bytes, int]
    specials: dict[str, int]


def read_text(path: Path) -> str:
    """Raises UserError where the file cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check its path and permissions") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); fetch it again") from None


def from_merges(ids: dict[str, int], merges: Iterable[list[str]], specials: dict[str, int]) -> BytePairs | None:
    """The tokens that bytes and merges make, for tiktoken; None where it would encode some text to other ids."""
    letters = letter_bytes()
    known = {token: i for token, i in ids.items() if token not in specials}
    if not all(letter in known for letter in letters):
        return None
    tokens = {bytes([byte]): known[letter] for letter, byte in letters.items()}
    last = -1
    made = []
    for pair in merges:
        union = known.get("".join(pair), -1)
        if len(pair) != 2 or union <= last or not all(set(part) <= letters.keys() for part in pair):
            return None
        left, right = (bytes(letters[c] for c in part) for part in pair)
        made.append((left, right))
        tokens[left + right] = last = union
    if len(tokens) != 256 + len(made) or len(set(tokens.values()) | set(specials.values())) < len(tokens) + len(
        specials
    ):
        return None
    return BytePairs(tokens, specials) if all(_leaves(tokens, *parts) for parts in made) else None


def _leaves(tokens: dict[bytes, int], left: bytes, right: bytes) -> bool:
    """Whether the tokens with smaller ids leave `left` and `right` of their union."""
    union = left + right
    own = tokens[union]
    splits = [i for i in range(1, len(union)) if union[:i] in tokens and union[i:] in tokens]
    if splits == [len(left)]:
        return True
    parts = [union[i : i + 1] for i in range(len(union))]
    while len(parts) > 2:
        ranks = [tokens.get(a + b, own) for a, b in pairwise(parts)]
        best = min(ranks)
        if best >= own:
            return False
        i = ranks.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts == [left, right]


def letter_bytes() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 letters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
