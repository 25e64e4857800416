"""A tokenizer by the name `BASE + FILE`, as the core asks for it: that of BASE, any other name or path, with the tokens
in a file. Whatever takes a tokenizer takes such a name: `dtgpt prepare --tokenizer 'MODEL + tokens.txt'`,
`--data.tokenizer_file`."""

from pathlib import Path

from dtgpt.data.tokenizers.open import TokenizerFormat, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer

AND = " + "


class WithTokens(TokenizerFormat):
    def is_called(self, name: str) -> bool:
        return AND in name

    def make(self, name: str) -> Tokenizer:
        from dtgpt.posttrain.add_tokens.tokens import read_tokens, with_tokens

        base, _, file = name.rpartition(AND)
        return with_tokens(open_tokenizer(base), read_tokens(Path(file)), file)


WITH_TOKENS = WithTokens()
