"""Characters as tokens, as nanoGPT's character data have them, and token ids of which no text is known."""

import json
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
        self.name, self._characters = "char", characters
        self.ranks = [c.encode("utf-8", "surrogatepass") for c in characters]
        self._ids = {c: i for i, c in enumerate(characters) if c}
        self.vocab_size, self.num_tokens = len(characters), len(self._ids)

    @property
    def opening(self) -> int:
        return self._ids.get("\n", 0)

    @classmethod
    def of_texts(cls, texts: list[str]) -> "Char":
        """Make a tokenizer of the characters of the texts, in their order in Unicode."""
        return cls(sorted(set().union(*texts)))

    def encode(self, text: str, special: bool = False) -> list[int]:
        try:
            return [self._ids[c] for c in text]
        except KeyError as error:
            raise UserError(
                f"the tokenizer char does not know the character {shown(error.args[0])}, which is not among the "
                f"{self.num_tokens} of the data that it is of; use other characters"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._characters[i] or "\ufffd" for i in ids)

    def token_bytes(self) -> np.ndarray:
        return np.array(list(map(len, self.ranks)), np.int64)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self._characters}

    def knows(self, text: str) -> bool:
        return self._ids.keys() >= set(text)

    def tokenizer_json(self) -> str:
        """Return it in Hugging Face's format, where another character is an error, too: no token stands for it."""
        model = {"type": "WordLevel", "vocab": self._ids, "unk_token": ""}
        return json.dumps({"version": "1.0", "added_tokens": [], **CHARACTERS, "model": model})

    @classmethod
    def of_tokenizer_json(cls, saved: dict[str, Any]) -> "Char | None":
        """Invert `tokenizer_json`. Return None where `saved`, whose ids are checked, is of another kind."""
        ids = saved["model"].get("vocab")
        same = all(saved.get(name) == value for name, value in CHARACTERS.items()) and not saved.get("added_tokens")
        if not same or saved["model"].get("type") != "WordLevel" or not ids or any(len(c) != 1 for c in ids):
            return None
        names = {i: c for c, i in ids.items()}
        return cls([names.get(i, "") for i in range(max(names) + 1)]) if len(names) == len(ids) else None


class Ids(Tokenizer):
    """Tokens of which only the ids are known: enough for losses per token, but no text becomes tokens or is made of
    them."""

    name, end_of_text, spells = "ids", None, False

    def __init__(self, vocab_size: int):
        if not 0 < vocab_size <= MOST:
            raise ValueError("it has no ids")
        self.vocab_size = self.num_tokens = vocab_size
        self.ranks = []

    @property
    def opening(self) -> int:
        raise self._unknown()

    def encode(self, text: str, special: bool = False) -> list[int]:
        if text:
            raise self._unknown()
        return []

    def _decode(self, ids: list[int]) -> str:
        raise self._unknown()

    def token_bytes(self) -> np.ndarray:
        return np.zeros(self.vocab_size, np.int64)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "ids": self.vocab_size}

    def _unknown(self) -> UserError:
        return UserError(
            "the model was trained on token ids alone (data.tokenizer=ids), so no text can become tokens or be made of "
            "them; train with the tokenizer of the data, or leave prompts and samples out"
        )
