"""Data sets and tokenizers of the Hub, as the core asks for them."""

from collections.abc import Iterable, Iterator

from dtgpt.data.open import DataFormat
from dtgpt.data.tokenizers.open import TokenizerFormat, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.hub.names import PREFIX, place


class NamedData(DataFormat):
    def is_name(self, path: str) -> bool:
        return path.startswith(PREFIX)

    def named_documents(self, name: str, json_key: str) -> Iterator[str] | None:
        if not name.startswith(PREFIX):
            return None
        from dtgpt.hub.rows import texts

        return texts(name, json_key)


class NamedTokenizer(TokenizerFormat):
    def is_called(self, name: str) -> bool:
        return name.startswith(PREFIX)

    def make(self, kind: str, documents: Iterable[str], vocab_size: int) -> Tokenizer:
        return open_tokenizer(str(place(kind, weights=False)))


DATA, TOKENIZERS = NamedData(), NamedTokenizer()
