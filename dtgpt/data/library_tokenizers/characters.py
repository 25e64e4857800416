"""The characters of a text as a tokenizer.json: Hugging Face's format for `Char`."""

import json
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Char

# Of a tokenizer.json whose tokens are the characters of a text.
CHARACTERS = {
    "normalizer": None,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "decoder": {"type": "Fuse"},
}


def characters_json(tokenizer: Char) -> str:
    """Return a tokenizer in Hugging Face's format, where another character is an error, too: no token stands for it."""
    model = {"type": "WordLevel", "vocab": tokenizer.ids, "unk_token": ""}
    return json.dumps({"version": "1.0", "added_tokens": [], **CHARACTERS, "model": model})


def read_characters(saved: dict[str, Any]) -> Char | None:
    """Invert `characters_json`. Return None where `saved`, whose ids are checked, is of another kind."""
    ids = saved["model"].get("vocab")
    same = all(saved.get(name) == value for name, value in CHARACTERS.items()) and not saved.get("added_tokens")
    if not same or saved["model"].get("type") != "WordLevel" or not ids or any(len(c) != 1 for c in ids):
        return None
    names = {i: c for c, i in ids.items()}
    return Char([names.get(i, "") for i in range(max(names) + 1)]) if len(names) == len(ids) else None
