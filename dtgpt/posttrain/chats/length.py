"""Texts that are far too long, which is seen before all of them is encoded."""

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.util.errors import UserError

SLICE, CUT = 8192, 16  # characters that are encoded at once to see how long a text is; tokens that cutting it may add


class TooLong(UserError):
    """A prompt that has far more tokens than the model has positions."""


def check_length(text: str, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise TooLong for a text of more than twice as many tokens as the model has positions, as soon as so many are
    found: to encode a text of a megabyte takes seconds."""
    most, found = 2 * config.seq_length, 0
    for begin in range(0, len(text) if len(text) > max(SLICE, most) else 0, SLICE):
        piece = text[begin : begin + SLICE]
        found += max(0, len(tokenizer.encode(piece, tokenizer.names_special)) - CUT)
        if found > most:
            raise TooLong(
                f"the prompt has more than {found} tokens, but this model's maximum context length is "
                f"{config.seq_length} tokens; use a shorter prompt"
            )
