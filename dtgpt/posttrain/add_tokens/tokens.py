"""Files of tokens, and tokenizers that have more than before.

A tokenizer with more tokens is always one of Hugging Face's library: its `added_tokens` are found in a text before it
is cut into pieces, so that each is one id wherever it stands, and transformers does the same with the file."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.data.library_tokenizers.added_tokens import special_token
from dtgpt.data.library_tokenizers.characters import Char
from dtgpt.data.library_tokenizers.export import tokenizer_json_of, transformers_files
from dtgpt.data.library_tokenizers.libraries import TokenizerJson
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import parse_json, read_regular

ADDED = "added_tokens"  # key of what a tokenizer keeps
LARGEST = 1 << 24  # bytes of a file
LONGEST = 1000  # characters of a token
WHOLE = {"truncation": None, "padding": None}  # a text is taken as it is
FORM = 'give one token a line, or a JSON list of texts and of {"content": TEXT, "special": true}'


class NewToken(NamedTuple):
    """A token to add. special: its name in a text stands for it only where names of special tokens are asked for."""

    content: str
    special: bool


def read_tokens(path: Path) -> list[NewToken]:
    """Return the tokens in a file. Raise UserError where it cannot be read, or has a line that is no token, or none."""
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); {FORM}") from None
    except OSError as error:
        raise UserError(f"{path}, the tokens to add, cannot be read ({error.strerror}); {FORM}") from None
    found = _of_json(text, path) if text.lstrip().startswith("[") and _is_json(text) else _of_lines(text, path)
    if not found:
        raise UserError(f"{path} has no token to add; {FORM}")
    seen = set[str]()
    for token in found:
        if token.content in seen:
            raise UserError(f"{path} has the token {shown(token.content)} twice; leave one out")
        seen.add(token.content)
    return found


def _is_json(text: str) -> bool:
    """Return whether a text that begins with a bracket is JSON, or means to be: `[TOOL]` is a token."""
    return text.lstrip()[1:].lstrip()[:1] in ('"', "{", "]")


def _of_lines(text: str, path: Path) -> list[NewToken]:
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if lines == [""]:
        return []
    for number, line in enumerate(lines, 1):
        if line != line.strip() or not line:
            what = "begins or ends with a blank" if line.strip() else "is empty"
            raise UserError(f"{path}: line {number} {what}; leave that out, or write a JSON list, whose texts may")
        _check(line, f"{path}: line {number}")
    return [NewToken(line, False) for line in lines]


def _of_json(text: str, path: Path) -> list[NewToken]:
    try:
        listed = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); {FORM}") from None
    found = []
    for number, entry in enumerate(listed, 1):
        entry = {"content": entry} if isinstance(entry, str) else entry
        known = isinstance(entry, dict) and {"content"} <= entry.keys() <= {"content", "special"}
        if not known or type(entry["content"]) is not str or type(entry.get("special", False)) is not bool:
            raise UserError(f"{path}: entry {number} is {shown(entry)}; {FORM}")
        if not entry["content"].strip():
            raise UserError(f"{path}: entry {number} is empty; leave it out")
        _check(entry["content"], f"{path}: entry {number}")
        found.append(NewToken(entry["content"], entry.get("special", False)))
    return found


def _check(content: str, where: str) -> None:
    try:
        content.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has half of a character, which no UTF-8 text has; leave it out") from None
    if len(content) > LONGEST:
        raise UserError(f"{where} has {len(content):,} characters; use tokens of at most {LONGEST:,}")


def with_tokens(base: Tokenizer, tokens: list[NewToken], file: str | os.PathLike[str]) -> TokenizerJson:
    """Return a tokenizer with the ids of `base`, and the next ones for `tokens`, in their order. file: for messages.
    Raise UserError where the tokenizer has one of them, or cannot take any."""
    if isinstance(base, Char) or not base.spells:
        kind = "has characters alone" if base.spells else "does not read texts"
        raise UserError(
            f"the tokenizer {base.name} {kind}, so that no token can be added to it; use a tokenizer.json, or one of "
            "dtgpt tokenizer train"
        )
    if isinstance(base, TokenizerJson):
        content = parse_json(tokenizer_json_of(base))
    else:  # of which the library's form is compared
        content = transformers_files(base, 1)["tokenizer.json"]
    content |= WHOLE
    plain = TokenizerJson(base.name, json.dumps(content, ensure_ascii=False), _end_name(base))
    for token in tokens:
        own = plain.id_of(token.content)
        if own is None and len(ids := plain.encode_bare(token.content)) == 1 and plain.decode(ids) == token.content:
            own = ids[0]
        if own is not None:
            raise UserError(
                f"{file} has {shown(token.content)}, which the tokenizer {base.name} has already, as the id {own}; "
                "leave it out"
            )
    first = base.vocab_size
    entries = [special_token(t.content, i, t.special) for i, t in enumerate(tokens, first)]
    content["added_tokens"] = [*(content.get("added_tokens") or []), *entries]
    made = TokenizerJson(f"{base.name} + {file}", json.dumps(content, ensure_ascii=False), plain.end_name)
    wrong = next((entry for entry in entries if made.id_of(entry["content"]) != entry["id"]), None)
    if wrong is not None or made.vocab_size != first + len(tokens):
        raise UserError(
            f"the tokenizer {base.name} has ids that are not in use below {first}, which its library would give to new "
            "tokens; add the tokens with transformers (add_tokens, save_pretrained), and use that folder"
        )
    made.additions = {**base.additions, ADDED: [*added_to(base), *entries]}
    return made


def _end_name(base: Tokenizer) -> str | None:
    return None if base.end_of_text is None else base.decode([base.end_of_text])


def added_to(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the tokens that were added to a tokenizer, as tokenizer.json has them, in the order of their ids."""
    return list(tokenizer.additions.get(ADDED, ()))
