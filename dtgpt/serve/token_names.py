"""The names of tokens in answers: their text, where it is whole characters."""

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.text import BROKEN


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
        spelled = tokenizer.bytes_of(i)
        if spelled is None:
            alone = tokenizer.decode([i])
            behind = tokenizer.decode([i, i])[len(alone) :]  # a library may drop a blank at the beginning
            return "" if BROKEN in behind else behind
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def by_id(i: int) -> str:
    """Return the name of a token that shares its text with another one."""
    return f"token_id:{i}"
