"""Options of rules: what changes logits before a token is chosen, and where a text ends besides the ends of texts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from torch import Tensor

from dtgpt.inference.base_options import (
    FRACTION,
    LARGEST,
    BaseOptions,
    SpecialIds,
    Values,
    check_number,
    check_whole,
    read_number,
)
from dtgpt.ops.sampling.sequences import MOST_BIASES, NONE, Variant
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds

if TYPE_CHECKING:
    from dtgpt.inference.rules.stop_strings import StopSearch

LONGEST_ID = 20  # digits
MOST_NGRAM = 32  # tokens in an n-gram that must not repeat
MOST_STOP_STRINGS, LONGEST_STOP_STRING = 16, 256  # characters
BIAS = 100  # largest absolute value, as in OpenAI's API
PENALTY = Bounds(-2, 2)
REPETITION = Bounds(0.01, 100)


def biases(given: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a bias of logits by its tokens. Raise UserError for a token that is given twice."""
    found: dict[Any, Any] = {}
    for token, bias in given:
        if token in found:
            raise UserError(f"logit_bias has the token {shown(token)} twice; leave one out")
        found[token] = bias
    return found


def read_biases(value: Any) -> Any:
    """Return a bias of logits by ids, which JSON has as texts."""
    if not isinstance(value, Mapping):
        return value
    return biases((int(key) if spells_id(key) else key, bias) for key, bias in value.items())


def biases_of_words(option: str, words: Iterable[str]) -> dict[Any, Any]:
    """Return a bias of logits by words ID:NUMBER."""
    split = [word.partition(":") for word in words]
    example = "50256:-100"
    return biases((read_number(option, i, int, example), read_number(option, x, float, example)) for i, _, x in split)


def spells_id(key: Any) -> bool:
    """Return whether a key, which JSON has as a text, may be an id."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < LONGEST_ID


def check_bias(name: str, bias: Any, vocab_size: int) -> None:
    """Raise UserError for what is no bias of logits."""
    if not isinstance(bias, Mapping):
        raise UserError(f"{name}={shown(bias)} is not a mapping; map token ids to numbers")
    if len(bias) > MOST_BIASES:
        raise UserError(f"{name} has {len(bias)} tokens; give {MOST_BIASES} at most")
    for token, value in bias.items():
        check_whole(f"a token of {name}", token, 0, vocab_size - 1)
        check_number(f"{name} of token {token}", value, -BIAS, BIAS)


def check_stop_strings(name: str, strings: Any, vocab_size: int = LARGEST) -> None:
    """Raise UserError where there are too many stop strings, or one of them is empty or too long."""
    if not isinstance(strings, tuple):
        raise UserError(f"{name}={shown(strings)} is not a text or a list of texts; give one")
    if len(strings) > MOST_STOP_STRINGS:
        raise UserError(f"{len(strings)} stop strings are too many; use up to {MOST_STOP_STRINGS}")
    for stop in strings:
        if not isinstance(stop, str) or not 1 <= len(stop) <= LONGEST_STOP_STRING:
            raise UserError(
                f"the stop string {shown(stop)} is not a text of 1 to {LONGEST_STOP_STRING} characters; change it"
            )


BIASES = Values(check_bias, biases_of_words, read_biases, ", as ID:NUMBER")


@dataclass(frozen=True, kw_only=True)
class RuleOptions(BaseOptions):
    """The options, and what they change."""

    headings: ClassVar[dict[str, str]] = {"min_new_tokens": "sampling", "stop_strings": "end of a text"}
    min_new_tokens: Annotated[
        int,
        "smallest number of tokens to add: tokens that end it cannot come before, stop strings do not count",
        Bounds(0, LARGEST),
    ] = 0
    top_p_decay: Annotated[float, "the t-th new token, from 0, has top_p x decay^t; 0: no decay", FRACTION] = 0.0
    top_p_bound: Annotated[float, "top_p does not decay below this", FRACTION] = 0.0
    min_p: Annotated[
        float, "choose from the tokens that are at least min_p times as likely as the likeliest; 0: from all", FRACTION
    ] = 0.0
    frequency_penalty: Annotated[float, "taken from a logit for each time that its token was generated", PENALTY] = 0.0
    presence_penalty: Annotated[float, "taken from a logit if its token was generated", PENALTY] = 0.0
    repetition_penalty: Annotated[
        float,
        "logits of tokens that the text has, prompt included, are divided by this; negative ones times it",
        REPETITION,
    ] = 1.0
    logit_bias: Annotated[Mapping[int, float], "numbers to add to the logits of up to 300 ids", BIASES] = field(
        default_factory=dict
    )
    no_repeat_ngram_size: Annotated[
        int, "no n tokens in a row occur twice, prompt included; 0: no limit", Bounds(0, MOST_NGRAM)
    ] = 0
    prevent_newline_after_colon: Annotated[bool, "no newline is drawn after a colon (Megatron-LM)"] = False
    stop_strings: Annotated[
        tuple[str, ...],
        "up to 16 texts; the result ends before the first of them, also if it spans tokens",
        Values(check_stop_strings),
    ] = ()
    stop_on_eol: Annotated[bool, "end a text after its first line, and ignore ends of text (Megatron-LM)"] = False
    stop_on_double_eol: Annotated[bool, "end a text after an empty line, and not at the end of text (Megatron-LM)"] = (
        False
    )

    def validate(self, vocab_size: int, positions: int) -> None:
        super().validate(vocab_size, positions)
        for name, most in (("min_new_tokens", "max_new_tokens"), ("top_p_bound", "top_p")):
            if getattr(self, name) > getattr(self, most):
                rule = f"is above {most}={getattr(self, most)}; use at most that"
                raise UserError(f"{name}={getattr(self, name)} {rule}")

    @property
    def variant(self) -> Variant:
        found, size = super().variant, self.no_repeat_ngram_size
        decays = self.top_p > 0 and 0 < self.top_p_decay < 1
        values = (self.frequency_penalty, self.presence_penalty, self.logit_bias, self.min_new_tokens)
        return found._replace(
            filters=found.filters or (not self.greedy and (decays or self.min_p > 0)),
            edits=self.prevent_newline_after_colon or self.repetition_penalty != 1 or any(values),
            ngram=1 << (size - 1).bit_length() if size else 0,
        )

    def parameters(
        self, special: SpecialIds, numbers: Mapping[str, float], bias: Mapping[int, float] | None = None
    ) -> Tensor:
        own: dict[str, float] = {"ngram": self.no_repeat_ngram_size, "min_new_tokens": self.min_new_tokens}
        names = ("top_p_decay", "top_p_bound", "min_p", "frequency_penalty", "presence_penalty")
        own |= {name: getattr(self, name) for name in names}
        if self.repetition_penalty != 1:  # where there are no rules, it is 0
            own["repetition_penalty"] = self.repetition_penalty
        if self.prevent_newline_after_colon and special.colon is not None and special.newline is not None:
            own |= {"colon": special.colon, "newline": special.newline}
        if self.stop_on_double_eol:
            own["paired_newline"] = NONE if special.newline is None else special.newline
        return super().parameters(special, {**numbers, **own}, self.logit_bias)

    def end_ids(self, special: SpecialIds) -> list[int]:
        """Return the ids that end a sequence whatever comes before them (Megatron-LM's rules for ends of lines)."""
        if self.stop_on_double_eol:
            rule = [special.double_newline]
        elif self.stop_on_eol:
            rule = [special.newline, special.double_newline]
        else:
            return super().end_ids(special)
        return [*self.stop_token_ids, *(token for token in rule if token is not None)]

    def decisive_ids(self, special: SpecialIds) -> set[int | None]:
        pair = {special.newline} if self.stop_on_double_eol else set()
        return super().decisive_ids(special) | pair | ({0} if self.no_repeat_ngram_size else set())

    def ends_at(self, special: SpecialIds, before: int, token: int, index: int) -> bool:
        return index >= self.min_new_tokens and self._would_end(special, before, token)

    def _would_end(self, special: SpecialIds, before: int, token: int) -> bool:
        pair = self.stop_on_double_eol and before == token == special.newline
        return pair or super().ends_at(special, before, token, 0)

    def bans_all(self, special: SpecialIds, prompt: list[int], new: list[int], token: int, logprob: float) -> bool:
        if token:
            return False
        ids, n = [*prompt, *new], self.no_repeat_ngram_size
        last = [*ids[len(ids) - n + 1 :], token]
        repeats = 0 < n <= len(ids) and any(ids[i : i + n] == last for i in range(len(ids) - n + 1))
        early = len(new) < self.min_new_tokens and self._would_end(special, ids[-1], token)
        return repeats or early or logprob == -math.inf

    @property
    def reads_text(self) -> bool:
        return bool(self.stop_strings)

    def text_end(self, job: Any) -> "StopSearch | None":
        if not (self.stop_strings or job.stops or self.stop_on_eol or self.stop_on_double_eol):
            return None
        from dtgpt.inference.rules.stop_strings import StopSearch, line_ends  # here: few texts end so

        strings, endings = (*self.stop_strings, *job.stops), line_ends(self, job.special)
        return StopSearch(strings, endings, self.min_new_tokens) if strings or endings else None
