"""The `logprobs` of a choice in OpenAI's form: four lists with an entry for each token, and the names of tokens, which
are their text where it is whole characters."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import text_stream
from dtgpt.inference.request import Alternatives
from dtgpt.inference.scores.options import Score
from dtgpt.serve.openai_request import Prompt, text_of
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
            return text_stream(tokenizer, self._before).extend([i])
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


@dataclass
class TokenLists:
    """The four lists. Those of the first token of a text have no log-probability: null."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)  # characters of the text before each token

    def take(self, count: int, length: int) -> dict[str, Any]:
        """Remove the first `count` entries and return them as an object, for a text of `length` characters: tokens
        of a stop string and after it begin where the text ends."""
        found = {name: values[:count] for name, values in vars(self).items()}
        found["text_offset"] = [min(offset, length) for offset in found["text_offset"]]
        for values in vars(self).values():
            del values[:count]
        return found


class Logprobs:
    """The log-probabilities of one choice, which arrive with its tokens."""

    def __init__(self, names: TokenNames, tokenizer: Tokenizer | None, prompt: Prompt, echo: bool):
        self._names, self._tokenizer, self._prompt = names, tokenizer, prompt
        self._offsets = Offsets(tokenizer, prompt.ids, len(prompt.text) if echo else 0)
        self._lists = TokenLists()

    def add_prompt(self, score: Score) -> None:
        """Add the tokens of the prompt."""
        ids, lists = score.ids, self._lists
        end = len(self._prompt.text)
        # What a tokenizer puts before a text, such as a begin of text, is not in the text as it was given.
        offsets = Offsets(self._tokenizer, start=end - len(text_of(self._tokenizer, ids)))
        lists.text_offset += [min(max(0, offsets.add(i)), end) for i in ids]
        lists.tokens.append(self._names[ids[0]])
        lists.token_logprobs.append(None)
        lists.top_logprobs.append(None)
        self._add_scores(ids[1:], score.logprobs, score.alternatives)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Alternatives]) -> None:
        """Add new tokens."""
        self._lists.text_offset += [self._offsets.add(i) for i in ids]
        self._add_scores(ids, logprobs, alternatives)

    def take_shown(self, length: int) -> dict[str, Any]:
        """Return the entries of tokens that begin within the first `length` characters of the text, which are certain,
        and forget them."""
        return self._lists.take(bisect_right(self._lists.text_offset, length), length)

    def take(self, length: int) -> dict[str, Any]:
        """Return all entries, for a text that has `length` characters, and forget them."""
        return self._lists.take(len(self._lists.tokens), length)

    def _add_scores(self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Alternatives]) -> None:
        names, lists = self._names, self._lists
        for place, (i, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            lists.tokens.append(names[i])
            lists.token_logprobs.append(max(LOWEST_LOGPROB, logprob))
            lists.top_logprobs.append(likeliest(names, i, logprob, alternatives[place] if alternatives else []))


def likeliest(names: TokenNames, chosen: int, logprob: float, alternatives: Alternatives) -> dict[str, float]:
    """Return log-probabilities by name, the likeliest first: those of `alternatives` and that of the chosen token,
    which is the same number where both have it. Of two tokens with the same text, one is named by its id."""
    name, found = names[chosen], {}
    for i, value in alternatives:
        other = names[i]
        found[by_id(i) if i != chosen and (other == name or other in found) else other] = max(LOWEST_LOGPROB, value)
    found[name] = max(LOWEST_LOGPROB, logprob)
    return found


class Offsets:
    """Where tokens begin in a text, in characters, which tokens may share."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] = (), start: int = 0):
        """prompt: ids before the first token. start: where the first token begins."""
        self._tokenizer, self._total = tokenizer, start
        self._stream = text_stream(tokenizer, prompt) if tokenizer else None

    def add(self, i: int) -> int:
        """Return where a token begins."""
        tokenizer, before = self._tokenizer, self._total
        if self._stream is None or tokenizer is None or i >= tokenizer.vocab_size:
            return before
        self._total += len(self._stream.extend([i]))
        spelled = tokenizer.bytes_of(i)
        # With this token, bytes before it may have turned out not to be a character: U+FFFD stands for them.
        return before if spelled is None else max(before, self._total - len(spelled.decode(errors="replace")))
