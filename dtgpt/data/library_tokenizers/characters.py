"""The characters of a text as tokens, and as a tokenizer.json: Hugging Face's format for them."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from dtgpt.data.tokenizers.tokenizer import MOST, Tokenizer
from dtgpt.util.errors import UserError, shown

# Of a tokenizer.json whose tokens are the characters of a text.
CHARACTERS = {
    "normalizer": None,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "decoder": {"type": "Fuse"},
}


class NoCharacters(UserError):
    """A file that may say which character each token is does not say so."""


class Char(Tokenizer):
    """Each character of a list is a token. `characters`: by id, "" for an id that is not in use. There is no end of
    text: a generated text without a prompt begins after a line's end, or after token 0."""

    end_of_text = None

    def __init__(self, characters: list[str]):
        if not all(isinstance(c, str) and len(c) <= 1 for c in characters) or not 0 < len(characters) <= MOST:
            raise ValueError("its characters are not single ones")
        self.name, self.characters = "char", characters
        self.ranks = [c.encode("utf-8", "surrogatepass") for c in characters]
        self.ids = {c: i for i, c in enumerate(characters) if c}
        self.vocab_size, self.num_tokens = len(characters), len(self.ids)

    @property
    def opening(self) -> int:
        return self.ids.get("\n", 0)

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> "Char":
        """Make a tokenizer of the characters of the texts, in their order in Unicode."""
        return cls(sorted(set().union(*texts)))

    def encode(self, text: str, special: bool = False) -> list[int]:
        try:
            return [self.ids[c] for c in text]
        except KeyError as error:
            raise UserError(
                f"the tokenizer char does not know the character {shown(error.args[0])}, which is not among the "
                f"{self.num_tokens} of the data that it is of; use other characters"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i] or "\ufffd" for i in ids)

    def token_bytes(self) -> np.ndarray:
        return np.array(list(map(len, self.ranks)), np.int64)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters}


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
