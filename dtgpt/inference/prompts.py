"""Between texts and ids: prompts become ids, and ids that arrive one after the other become text.

Users give prompts as texts or ids, one or many. On the way back a token need not be a whole character, so that a stream
of text holds back what later tokens may complete. Where nothing says which tokenizer a model has, it is found here.
"""

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from dtgpt.checkpoint.open import tokenizer_beside
from dtgpt.data.tokenizers.open import FILES, make_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import SpecialIds
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.util import seams
from dtgpt.util.errors import UserError


def encode(text: str, tokenizer: Tokenizer, config: ModelConfig, split_special_tokens: bool = False) -> list[int]:
    """Return the ids of a prompt, with what the tokenizer puts before every text; an empty one begins a document.
    Raise UserError where the tokenizer or the model does not know the text."""
    ids = tokenizer.encode_prompt(text, split_special_tokens)
    if not ids:
        if tokenizer.opening is None:
            raise UserError(
                f"the tokenizer {tokenizer.name} has no end of text to begin a document with; give a prompt"
            )
        ids = [tokenizer.opening]
    if max(ids) >= config.vocab_size:
        raise UserError(
            f"the prompt has token {max(ids)} of {tokenizer.name}, but the model has {config.vocab_size} tokens; "
            "give the tokenizer that the model was trained with"
        )
    return ids


def tokenizer_of(path: Path, config: ModelConfig) -> Tokenizer:
    """Return the tokenizer saved with the run or folder; else GPT-2's own, if the model has as many tokens."""
    if beside := tokenizer_beside(path):
        return beside
    if config.vocab_size == GPT2_124M.vocab_size:
        return make_tokenizer("gpt2", [], 0)
    raise UserError(
        f"no tokenizer is saved with {path}, whose {config.vocab_size} tokens are not GPT-2's; give a run folder, "
        f"or --tokenizer (in Python: tokenizer) with {FILES}"
    )


def special_ids(tokenizer: Tokenizer | None, ends: Sequence[int], vocab_size: int = 0) -> SpecialIds:
    """Return the ids that rules look for, None where no single token spells one. `ends`: that end the model's texts.
    vocab_size: of a model whose tokenizer is not known."""
    found = [find(tokenizer, vocab_size) for find in seams.listed("special_ids")]
    return SpecialIds(tuple(ends), **{name: token for ids in found for name, token in ids.items()})


class TextStream(Protocol):
    """The text of ids that arrive one after the other, what a capability has at the seam `text_streams` for tokens
    whose text depends on those around them. Its attributes are replaced, and never changed in place.

    All pieces together are the text that the ids add to that of the prompt, which ends with a whole character. So does
    each piece: bytes that later ones may complete are held back.
    """

    def skip(self, prompt: Sequence[int]) -> None:
        """Take the ids behind which the others come."""

    def extend(self, ids: Sequence[int]) -> str:
        """Return the text that is certain with these ids."""

    def finish(self) -> str:
        """Return the rest, in which U+FFFD stands for an incomplete character."""


def text_stream(tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> TextStream:
    """Return the stream of the text behind a prompt."""
    if tokenizer.bytes_of(0) is not None:  # each token is the same bytes in every text
        stream: TextStream = _Bytes(tokenizer)
    else:
        missing = f"the tokens of {tokenizer.name} are no bytes, and no capability here makes text of them"
        stream = seams.first("text_streams", missing)(tokenizer)
    stream.skip([i for i in prompt if i < tokenizer.vocab_size])  # a model may have more tokens
    return stream


class _Bytes:
    """Decode tokens that are bytes, whatever is around them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._held = b""  # of a character that is not complete

    def skip(self, prompt: Sequence[int]) -> None:
        self.extend(prompt[-4:])  # a character has up to four bytes

    def extend(self, ids: Iterable[int]) -> str:
        bytes_of = self._tokenizer.bytes_of
        found = b"".join([self._held, *(bytes_of(i) or b"" for i in ids)])
        text, read = codecs.utf_8_decode(found, "replace")
        self._held = found[read:]
        return text

    def finish(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text
