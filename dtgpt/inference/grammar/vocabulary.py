"""The tokens of a model as llguidance needs them, and the grammars that were compiled for them."""

import json
from functools import lru_cache
from typing import Any

import numpy as np

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.grammar.one_of import one_of_is_any_of
from dtgpt.util.errors import UserError
from dtgpt.util.shared.optional import optional_package

BLANKS = r" |\n[ \t]{0,64}"  # between parts of JSON: without a limit, a text might have nothing else
BROKEN = "\ufffd"
MARK = "\x02"  # no tokenizer merges it with what is behind
LONGEST_REASON = 200  # characters of what the library says


def settings_of(schema: Any) -> dict[str, Any]:
    """Return how the library is to take a schema."""
    return {"whitespace_pattern": BLANKS, "coerce_one_of": one_of_is_any_of(schema)}


def token_texts(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes that each token adds to a text: none for special tokens, for parts of characters whose bytes are
    not known, and for bytes that another token spells, with which no text is encoded."""
    before = tokenizer.encode_bare("a")
    begin = len(tokenizer.decode(before))

    def text(i: int) -> bytes:
        if (known := tokenizer.bytes_of(i)) is not None:
            return known
        found = tokenizer.decode([*before, i])[begin:]  # a library may drop the blank at the beginning of a text
        return b"" if BROKEN in found else found.encode()

    single = {i: bytes([byte]) for i in range(tokenizer.vocab_size) if (byte := tokenizer.byte_of(i)) is not None}
    sizes = enumerate(tokenizer.token_bytes())
    texts = [text(i) if size and i not in single else b"" for i, size in sizes]
    spelled = set(texts)
    return [b"" if i in single and single[i] in spelled else single.get(i, known) for i, known in enumerate(texts)]


class Vocabulary:
    """The tokens of a tokenizer. `end`: an id behind all of them, which stands for the end of a text."""

    def __init__(self, tokenizer: Tokenizer):
        self.library = optional_package("llguidance", "JSON by a schema", extra="json")
        self.end = self.eos_token_id = tokenizer.vocab_size
        self.bos_token_id = None
        self.tokens = [*token_texts(tokenizer), b""]
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if not text]
        self._encode = tokenizer.encode_bare
        self._ids = {text: i for i, text in reversed([*enumerate(self.tokens)]) if text}
        self._longest = max(map(len, self._ids), default=0)
        self.opened = self.library.LLTokenizer(self.library.TokenizerWrapper(self), n_vocab=self.end + 1)

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of a text that stands within another one: what must come is allowed as these alone."""
        try:  # a library may begin a text with a blank
            before, ids = self._encode(MARK), self._encode(MARK + text.decode())
        except (UnicodeDecodeError, UserError):
            return self._longest_first(text)
        rest = ids[len(before) :]
        fits = ids[: len(before)] == before and b"".join(self.tokens[i] for i in rest) == text
        return rest if fits else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Cut a text into the longest tokens, from its beginning on, up to where none fits."""
        ids, place = list[int](), 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            size = next((size for size in sizes if text[place : place + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[place : place + size]])
            place += size
        return ids

    def compile(self, schema: str, grammar: str) -> Any:
        """Return what knows which tokens a grammar allows: of a schema, or in Lark's form. Raise UserError where the
        library cannot keep to it."""
        matcher = self.library.LLMatcher
        if schema:
            grammar = matcher.grammar_from_json_schema(schema, overrides=settings_of(json.loads(schema)))
        else:
            grammar = matcher.grammar_from_lark(grammar)
        found = matcher(self.opened, grammar, log_level=0, limits=self.library.LLParserLimits(verbose_errors=False))
        if found.is_error():
            reason = " ".join(found.get_error().split())[:LONGEST_REASON]
            raise UserError(f"the JSON schema cannot be kept to ({reason}); change it")
        return found

    def words(self, matcher: Any, ends: list[int]) -> np.ndarray:
        """Return which ids a matcher allows as bits, int32 `[W]`: those of `ends` where the text may end."""
        words = np.frombuffer(matcher.compute_bitmask(), np.int32).copy()
        if matcher.is_error():  # at a limit of the library, nothing may come
            words[:] = 0
        if words[self.end // 32] >> self.end % 32 & 1:
            set_bits(words, ends)
        set_bits(words, [self.end], False)
        return words

    def all_but(self, ends: list[int]) -> np.ndarray:
        """Return the bits of all ids but `ends`, int32 `[W]`."""
        words = np.full(-(-self.end // 32), -1, np.int32)
        set_bits(words, ends, False)
        return words


def set_bits(words: np.ndarray, ids: list[int], value: bool = True) -> None:
    """Set the bits of ids, of those that there are, in words int32 `[W]`."""
    for i in ids:
        if i // 32 < len(words):
            bit = np.array(1 << i % 32, np.uint32).view(np.int32)
            words[i // 32] = words[i // 32] | bit if value else words[i // 32] & ~bit


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer, which takes a second for a large one."""
    return Vocabulary(tokenizer)


@lru_cache(maxsize=64)
def compiled(tokenizer: Tokenizer, schema: str, grammar: str) -> Any:
    """Return what `Vocabulary.compile` does. Copy it before use."""
    return vocabulary_of(tokenizer).compile(schema, grammar)
