"""Tokens of line ends and colons, at which rules of generated texts look."""

from collections.abc import Mapping

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import text_stream
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.util.errors import UserError

TEXTS = {"newline": "\n", "double_newline": "\n\n", "colon": ":"}
GPT2_IDS = {"newline": 198, "double_newline": 628, "colon": 25}  # of a model with its vocabulary


def find_ids(tokenizer: Tokenizer | None, vocab_size: int) -> Mapping[str, int | None]:
    """Return the ids by what they are; none of a tokenizer without texts. vocab_size: of a model without one."""
    if tokenizer is None:
        return GPT2_IDS if vocab_size == GPT2_124M.vocab_size else {}
    return {name: token_of(tokenizer, text) for name, text in TEXTS.items()} if tokenizer.spells else {}


def token_of(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the token that spells `text` within other text; None where no single token does."""
    for before in ("a", ""):
        try:
            opening, ids = tokenizer.encode(before), tokenizer.encode(before + text)
        except UserError:  # a vocabulary of characters, without one of these
            continue
        same = ids[:-1] == opening and text_stream(tokenizer, opening).extend(ids[-1:]) == text
        return ids[-1] if same else None
    return None
