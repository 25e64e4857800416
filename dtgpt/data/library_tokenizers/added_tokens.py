"""Tokens that a Hugging Face folder adds to a vocabulary in other files, with their ids: `added_tokens_decoder` of
tokenizer_config.json, or added_tokens.json of older folders."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from dtgpt.data.library_tokenizers.folder import SETTINGS, read_settings, special_tokens
from dtgpt.data.tokenizers.tokenizer import MOST
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import read_json

LEGACY = "added_tokens.json"
LISTS = ("additional_special_tokens", "extra_special_tokens")
FETCH = "fetch the folder again"


def added_tokens(vocab: Path) -> list[dict[str, Any]]:
    """Return the tokens that files beside `vocab` add, as tokenizer.json has them, in the order of their ids. Raises
    UserError where they are none, or an id is given twice."""
    decoder = read_settings(vocab.with_name(SETTINGS[0])).get("added_tokens_decoder")
    found = _of_older_folder(vocab) if decoder is None else _of_decoder(decoder, vocab.with_name(SETTINGS[0]))
    found.sort(key=lambda token: token["id"])
    for one, following in pairwise(found):
        if one["id"] == following["id"]:
            raise UserError(
                f"files beside {vocab} give {shown(one['content'])} and {shown(following['content'])} the id "
                f"{one['id']}; {FETCH}"
            )
    return found


def check_added(found: list[dict[str, Any]], ids: Mapping[str, int], vocab: Path) -> None:
    """Raise UserError where added tokens contradict the vocabulary's `ids`."""
    names = {i: token for token, i in ids.items()}
    for token in found:
        name, i = token["content"], token["id"]
        if ids.get(name, i) != i or names.get(i, name) != name:
            raise UserError(
                f"files beside {vocab} give {shown(name)} the id {i}, which {vocab.name} has as "
                f"{shown(names[i]) if i in names else ids[name]}; {FETCH}"
            )


def check_has_added(path: Path, has: Callable[[dict[str, Any]], bool]) -> None:
    """Raise UserError where files beside a tokenizer add tokens that it does not have."""
    for token in added_tokens(path):
        if not has(token):
            raise UserError(
                f"files beside {path} add tokens that it does not have, such as {shown(token['content'])}; put the "
                "tokenizer.json there that transformers' AutoTokenizer saves"
            )


def _of_decoder(decoder: Any, path: Path) -> list[dict[str, Any]]:
    found = []
    for i, token in decoder.items() if isinstance(decoder, dict) else [("", None)]:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not _is_id(i):
            raise UserError(f"{path} has an added_tokens_decoder that is not an object of id: token; {FETCH}")
        plain = special_token(token["content"], int(i), False)
        found.append(plain | {name: bool(token[name]) for name in plain if isinstance(token.get(name), bool)})
    return found


def _of_older_folder(vocab: Path) -> list[dict[str, Any]]:
    path = vocab.with_name(LEGACY)
    if not path.is_file():
        return []
    listed = read_json(path, FETCH)
    if not isinstance(listed, dict) or not all(map(_is_id, listed.values())):
        raise UserError(f"{path} is not an object of token: id; {FETCH}")
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        settings |= read_settings(vocab.with_name(name))
    names: list[Any] = [*special_tokens(settings).values()]
    for more in (settings.get(name) for name in LISTS):
        names += (
            [one.get("content") if isinstance(one, dict) else one for one in more] if isinstance(more, list) else []
        )
    found = [special_token(name, i, name in names) for name, i in listed.items()]
    return [token | {"normalized": not token["special"]} for token in found]


def _is_id(value: Any) -> bool:
    text = str(value)
    return not isinstance(value, bool) and text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < MOST


def special_token(content: str, id_: int, special: bool = True) -> dict[str, Any]:
    """Return an entry of `added_tokens` in Hugging Face's format."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, **flags, "special": special}


def opening_template(name: str, id_: int) -> dict[str, Any]:
    """Return the post-processor in Hugging Face's format that opens each text with the token `name`."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]}},
    }
