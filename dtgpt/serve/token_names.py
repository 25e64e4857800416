"""Tokens in answers: their names, which are their text where it is whole characters, and their lowest number."""

from functools import cached_property

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import TextStream
from dtgpt.util.errors import UserError

LOWEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have, as vLLM


class TokenNames:
    """Names of tokens by id, made once each."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, i: int) -> str:
        """Return the text of a token; `bytes:\\xe2\\x80` for bytes that are not whole characters, as OpenAI's API names
        them; `token_id:5` for a token without a text, as vLLM does."""
        name = self._known.get(i)
        if name is None:
            name = self._known[i] = self._name(i) or by_id(i)
        return name

    def _name(self, i: int) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None or i >= tokenizer.vocab_size:
            return ""
        spelled, byte = tokenizer.bytes_of(i), tokenizer.byte_of(i)
        if byte is not None:
            spelled = bytes([byte])
        if spelled is None:
            return TextStream(tokenizer, self._before).add(i)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    @cached_property
    def _before(self) -> list[int]:
        """Ids of a text that stands before a token: a library may drop the blank at the beginning of a text."""
        try:
            return self._tokenizer.encode("a") if self._tokenizer else []
        except UserError:  # a vocabulary of characters, without this one
            return []


def by_id(i: int) -> str:
    """Return the name of a token that shares its text with another one."""
    return f"token_id:{i}"
