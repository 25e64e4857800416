"""A byte-level BPE as a vocabulary and a list of merges, and whether tiktoken would encode with it to the same ids.

BPE by the list merges the adjacent pair that stands first in it. tiktoken has no list: it merges the adjacent pair
whose union has the smallest id. The two agree where merges stand in the order of the ids they make, each token is made
by one merge only, and the tokens before it, merged by tiktoken's rule, leave of its bytes just the two of that merge.
(A merge of other two parts would need its bytes to be parted in that way in a text; but as long as nothing has merged
across its borders, what lies between them goes the same way as it does alone.)
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dtgpt.data.library_tokenizers.added_tokens import special_token
from dtgpt.data.library_tokenizers.byte_level import letter_bytes
from dtgpt.data.library_tokenizers.merges import last_parts
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LIKE_SPECIAL = re.compile(r"<.*\w.*>|\[.*\w.*\]")  # <pad>, <|im_start|>, <0x0A>, [MASK]: names, and no pieces of text


class BytePairs(NamedTuple):
    """`ids` of tokens by their bytes, `specials` by their names, `merges` in the order of the ids that they make."""

    ids: dict[bytes, int]
    specials: dict[str, int]
    merges: list[tuple[bytes, bytes]]


def from_merges(ids: dict[str, int], merges: Iterable[list[str]], specials: dict[str, int]) -> BytePairs | None:
    """Return the tokens that bytes and merges make, for tiktoken; None if it would encode some text to other ids."""
    letters = letter_bytes()
    known = {token: i for token, i in ids.items() if token not in specials}
    merges = list(merges)
    whole = all(len(pair) == 2 for pair in merges) and letters.keys() >= set("".join(chain.from_iterable(merges)))
    if not whole or not known.keys() >= letters.keys():
        return None
    tokens = {bytes([byte]): known[letter] for letter, byte in letters.items()}
    to_latin = str.maketrans({letter: chr(byte) for letter, byte in letters.items()})
    last = -1
    made = []
    for left, right in merges:
        union = known.get(left + right, -1)
        if union <= last:
            return None
        pair = left.translate(to_latin).encode("latin-1"), right.translate(to_latin).encode("latin-1")
        made.append(pair)
        tokens[pair[0] + pair[1]] = last = union
    if len(tokens) != 256 + len(made) or len(set(tokens.values()) | set(specials.values())) < len(tokens) + len(
        specials
    ):
        return None
    return BytePairs(tokens, specials, made) if all(last_parts(tokens, a + b) == [a, b] for a, b in made) else None


def check_merges(
    ids: Mapping[str, int],
    merges: Sequence[list[str]],
    specials: Mapping[str, int],
    vocab: Path,
    source: Path,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise UserError if merges (of the file `source`) or tokens (of `vocab`) are missing, so that texts would be cut
    into other tokens. model: settings of a tokenizer.json.

    Every token but bytes and special ones is made by a merge. If none makes it, though it is the union of two others,
    its merge is lost, unless whole words need no merge (`ignore_merges`) or it is named like a special token.
    """
    words = {name: value for name, value in model.items() if isinstance(value, str)}
    prefix, suffix = (words.get(name, "") for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    # By sets: there are half a million merges in some files.
    if not ({*map(type, merges)} <= {list} and {*map(len, merges)} <= {2}):
        return  # not merges at all, as the library will say
    if not {*map(type, chain.from_iterable(merges))} <= {str}:
        return
    unions = [left + right.removeprefix(prefix) for left, right in merges]
    made = set(unions)
    if not ids.keys() >= made.union(chain.from_iterable(merges)):
        (left, right), missing = next(
            (pair, token)
            for pair, union in zip(merges, unions, strict=True)
            for token in (*pair, union)
            if token not in ids
        )
        raise UserError(
            f"{source} merges {shown(left)} and {shown(right)}, but {vocab} has no token {shown(missing)}, so "
            "that one was cut off or they are of two tokenizers; fetch them again"
        )
    apart = {*specials, words.get("unk_token"), *made}
    lost = [
        token
        for token in ids
        if token not in apart
        and len(token.removesuffix(suffix).removeprefix(prefix)) > 1
        and any(token[:i] in ids and token[i:] in ids for i in range(1, len(token)))
        and not LIKE_SPECIAL.fullmatch(token)
    ]
    if lost and not model.get("ignore_merges"):
        raise UserError(
            f"{source} lacks the merges of {counted(len(lost), 'token')} of {vocab}, such as {shown(lost[0])}, "
            "so that it was cut off or is of another tokenizer; fetch it again"
        )


def tokenizer_json(
    ids: Mapping[str, int],
    merges: list[str],
    specials: Mapping[str, int],
    pre_tokenizer: dict | None = None,
    ignore_merges: bool = False,
    **parts: Any,
) -> str:
    """Return a byte-level BPE in Hugging Face's format, by default with GPT-2's pre-tokenization. parts: others of the
    format, None to leave one out."""
    model = {"type": "BPE", "ignore_merges": ignore_merges, "vocab": {**ids, **specials}, "merges": merges}
    added = [special_token(name, i) for name, i in specials.items()]
    whole = {"added_tokens": added, "pre_tokenizer": pre_tokenizer or BYTE_LEVEL, "decoder": BYTE_LEVEL, "model": model}
    rare = {name: part for name, part in parts.items() if part is not None}
    return json.dumps({"version": "1.0", **whole, **rare}, ensure_ascii=False)
