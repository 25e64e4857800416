"""tiktoken's files of ranks, such as Llama 3's `tokenizer.model` and Qwen's `qwen.tiktoken`.

A line is a token in base64 and its id. Such a file says neither how a text is cut before bytes are merged nor what the
special tokens are, so both are known here for the families that publish such files.
"""

import base64
import binascii
import re
from pathlib import Path
from typing import NamedTuple

from dtgpt.data.library_tokenizers.base import ENDS
from dtgpt.data.library_tokenizers.byte_level import ByteLevel, by_id
from dtgpt.data.tokenizers.tokenizer import END_OF_TEXT, MOST
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Given, Is, Other, Rule, Rules, check_rules

LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})")
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REMEDY = "fetch it again"


RANK_RULES: Rules = (
    Rule(f"{{path}} has no token for the byte {{missing:#04x}}, so that it was cut off; {REMEDY}", Given("is_cut")),
    Rule(f"{{path}} gives one id to two tokens; {REMEDY}", Is("ids", "<", Other("tokens"))),
)


class RankFileKind(NamedTuple):
    """What a file of ranks does not say: the pattern by which texts are cut, the names of the special tokens, whose ids
    follow the ranks, the name of the begin of text, and whether texts are composed (Unicode's NFC) first."""

    pattern: str
    specials: list[str]
    begin: str | None
    composed: bool


def _reserved(numbers: range) -> list[str]:
    return [f"<|reserved_special_token_{i}|>" for i in numbers]


LLAMA3 = RankFileKind(
    "|".join((WORDS, r"\p{N}{1,3}", SIGNS)),
    [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *_reserved(range(4)),
        "<|start_header_id|>",
        "<|end_header_id|>",
        *_reserved(range(4, 5)),
        "<|eot_id|>",
        *_reserved(range(5, 251)),
    ],
    "<|begin_of_text|>",
    False,
)
QWEN = RankFileKind(
    "|".join((WORDS, r"\p{N}", SIGNS)),
    [END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))],
    None,
    True,
)
FAMILIES = {("tokenizer.model", 128_000): LLAMA3, ("qwen.tiktoken", 151_643): QWEN}  # by usual name and number of ranks


def is_rank_file(content: bytes) -> bool:
    """Return whether a file begins as one of ranks. A SentencePiece model, which may have the same name, begins with a
    line feed."""
    return LINE.fullmatch(content[:4096].partition(b"\n")[0].rstrip(b"\r")) is not None


def from_ranks(path: Path, content: bytes, begin: bool = False, end: str | None = None) -> ByteLevel:
    """Return the tokenizer of a file of ranks. begin: each text opens with the begin of text. end: the name of the end
    of text, where another file says it. Raise UserError where the file is damaged, or of a family that is not known
    here."""
    ids = _read(path, content)
    family = _family(path, len(ids))
    first = max(ids.values()) + 1
    specials = {name: first + i for i, name in enumerate(family.specials)}
    ends = (end, *ENDS) if end else ENDS
    return ByteLevel(
        str(path),
        family.pattern,
        by_id(ids),
        specials,
        ends,
        begin=family.begin,
        opens=begin,
        composed=family.composed,
    )


def _family(path: Path, ranks: int) -> RankFileKind:
    known = [family for (_, size), family in FAMILIES.items() if size == ranks]
    known += [family for (name, size), family in FAMILIES.items() if name == path.name and ranks < size]
    if not known:
        words = " and ".join(f"{name} ({size:,} ranks)" for name, size in FAMILIES)
        raise UserError(
            f"{path} holds {ranks:,} ranks of tiktoken without the pattern by which texts are cut, which dtgpt knows "
            f"for {words}; give a tokenizer.json"
        )
    return known[0]


def _read(path: Path, content: bytes) -> dict[bytes, int]:
    """Return the ids by their tokens."""
    ids: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        found = LINE.fullmatch(line)
        try:
            token = base64.b64decode(found[1], validate=True) if found else b""
        except binascii.Error:
            token = b""
        if found is None or not token or int(found[2]) >= MOST:
            raise UserError(
                f"{path} has {shown(line)} on line {number}, which is not a token in base64 and its id; {REMEDY}"
            )
        if token in ids:
            raise UserError(f"{path} has the token of line {number} twice; {REMEDY}")
        ids[token] = int(found[2])
    missing = next((byte for byte in range(256) if bytes([byte]) not in ids), None)
    values = {"path": path, "is_cut": missing is not None, "missing": missing, "ids": len(set(ids.values()))}
    check_rules(RANK_RULES, values, tokens=len(ids))
    return ids
