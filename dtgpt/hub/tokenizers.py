"""Tokenizers of the Hub, as the core asks for them."""

from dtgpt.data.tokenizers.open import TokenizerFormat, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.hub.names import PREFIX, place


class NamedTokenizer(TokenizerFormat):
    def is_called(self, name: str) -> bool:
        return name.startswith(PREFIX)

    def make(self, name: str) -> Tokenizer:
        return open_tokenizer(str(place(name, weights=False)))


TOKENIZERS = NamedTokenizer()
