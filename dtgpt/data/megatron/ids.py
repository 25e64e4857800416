"""Token ids of which no text is known: what `data.tokenizer=ids` takes token files for."""

from typing import Any

import numpy as np

from dtgpt.data.tokenizers.tokenizer import MOST, Tokenizer
from dtgpt.util.errors import UserError


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


def from_json(saved: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of which `to_json` wrote this."""
    return Ids(saved["ids"])
