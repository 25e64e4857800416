"""Requests to the engine, and the events that it returns."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from dtgpt.inference.sampling import Sampling, SpecialIds, endings_of
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

NO_SPECIAL_IDS = SpecialIds()
Candidates = Sequence[tuple[int, float]]  # (id, log-probability) of the likeliest tokens of a row
MOST_ALTERNATIVES = 64  # likeliest tokens for each position


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how `choices` sequences go on from it."""

    ids: list[int]
    sampling: Sampling
    special: SpecialIds = NO_SPECIAL_IDS
    prompt_index: int = 0  # of the prompt in its list: with the seed it determines the draws
    choices: int = 1
    score_prompt: bool = False  # whether the tokens of the prompt get log-probabilities
    alternatives: int = 0  # number of likeliest tokens to return for each position
    search: "Search | None" = None  # instead of draws: the choices are the best sequences that it finds
    client: str = ""  # who shares the slots fairly with others

    @property
    def rows(self) -> int:
        """The number of slots that the request needs at once."""
        return self.choices if self.search is None else self.search.rows

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a sequence whatever comes before them."""
        return endings_of(self.sampling, self.special)

    def validate(self, vocab_size: int, positions: int, slots: int) -> None:
        """Raise UserError for a request that no engine of these sizes can serve."""
        check_prompt(self.ids, vocab_size)
        self.sampling.validate(vocab_size, positions)
        new, whole = self.sampling.max_new_tokens, len(self.ids) + self.sampling.max_new_tokens
        if whole > positions:
            fewer = f"max_new_tokens={positions - len(self.ids)} or less, or " if len(self.ids) < positions else ""
            given = f"a prompt of {counted(len(self.ids), 'token')}"
            if new == 0:
                raise UserError(f"{given} does not fit into the model's {positions} positions; use a shorter one")
            raise UserError(
                f"{given} and max_new_tokens={new} need {whole} positions, but the model has {positions}; use "
                f"{fewer}a shorter prompt"
            )
        if new == 0 and not self.score_prompt:
            raise UserError("max_new_tokens=0 generates nothing; use 1 or more, or ask for scores of the prompt")
        if self.search is not None:
            self.search.validate(self, vocab_size)
        if not 1 <= self.rows <= slots:
            what = "choice" if self.search is None else self.search.words[0]
            raise UserError(
                f"{counted(self.rows, what)} of a prompt need as many slots of the cache, which has "
                f"{slots}; use 1 to {slots}, or more slots"
            )
        most = min(MOST_ALTERNATIVES, vocab_size)
        if not 0 <= self.alternatives <= most:
            raise UserError(f"alternatives={self.alternatives} is not a number of tokens; use 0 to {most}")

    def accept(self, new: list[int], tokens: list[int], logprobs: list[float]) -> tuple[int, str | None]:
        """Return how many of `tokens`, whose `logprobs` these are, continue a sequence that has `new` ones, and the
        reason of its end, None where it goes on. NOT_FINITE: a log-probability is NaN."""
        left = self.sampling.max_new_tokens - len(new)
        if self._decisive_ids.isdisjoint(tokens) and math.isfinite(sum(logprobs)):  # the length alone can end it
            return min(left, len(tokens)), "length" if left <= len(tokens) else None
        ids = [*new]
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if math.isnan(logprob):
                return place, NOT_FINITE
            if self.bans_all(ids, token, logprob):
                return place, "length"
            before = ids[-1] if ids else self.ids[-1]
            ids.append(token)
            if self.ends_with(before, token, len(ids) - 1):
                return place + 1, "stop"
            if place + 1 == left:
                return left, "length"
        return len(tokens), None

    @cached_property
    def _decisive_ids(self) -> frozenset[int | None]:
        """The ids at which `ends_with` or `bans_all` may be true, where log-probabilities are finite."""
        pair = [self.special.newline] if self.sampling.stop_on_double_eol else []
        return frozenset([*self.stop_ids, *pair, *([0] if self.sampling.no_repeat_ngram_size else [])])

    def ends_with(self, before: int, token: int, index: int) -> bool:
        """Return whether new token number `index`, from 0, ends the sequence. `before`: the token before it."""
        return index >= self.sampling.min_new_tokens and self._would_end(before, token)

    def _would_end(self, before: int, token: int) -> bool:
        sampling, special = self.sampling, self.special
        if token in sampling.stop_token_ids:
            return True
        if sampling.stop_on_double_eol:
            return token == special.double_newline or before == token == special.newline
        if sampling.stop_on_eol:
            return token in (special.newline, special.double_newline)
        return sampling.ends and token in special.ends

    def bans_all(self, new: list[int], token: int, logprob: float) -> bool:
        """Return whether rules banned every token after `new` ones: `sample` then chose id 0, which is banned, too."""
        if token:
            return False
        ids, n = [*self.ids, *new], self.sampling.no_repeat_ngram_size
        last = [*ids[len(ids) - n + 1 :], token]
        repeats = 0 < n <= len(ids) and any(ids[i : i + n] == last for i in range(len(ids) - n + 1))
        early = len(new) < self.sampling.min_new_tokens and self._would_end(ids[-1], token)
        return repeats or early or logprob == -math.inf


def check_prompt(ids: list[int], vocab_size: int) -> None:
    """Raise UserError for a prompt that is empty or has ids out of range."""
    if not ids:
        raise UserError("the prompt is empty; give at least one token")
    check_range(min(ids), max(ids), vocab_size)


def check_range(smallest: int, largest: int, vocab_size: int) -> None:
    """Raise UserError where ids from `smallest` to `largest` are not all tokens of the model."""
    if smallest < 0 or largest >= vocab_size:
        ids = f"ids {shown(smallest)} to {shown(largest)}"
        raise UserError(f"{ids} are not all tokens of this model; use 0 to {vocab_size - 1}")


class Search(Protocol):
    """How the host searches for the sequences of a request, in place of draws: what a capability adds."""

    @property
    def rows(self) -> int:
        """The number of slots that it needs at once."""

    @property
    def words(self) -> tuple[str, str, str]:
        """What a row is called in messages, the option that asks for the search, and the one that does not."""

    def validate(self, request: Request, vocab_size: int) -> None:
        """Raise UserError for a request that cannot be searched like this."""

    def begin(self, request: Request, slots: list[int]) -> "SearchedRows":
        """Return the search for a request whose first slot has read the prompt."""


class SearchedRows(Protocol):
    """A search on its way. The choices of the request are its rows, in the slots that it was given."""

    @property
    def alternatives(self) -> int:
        """The number of likeliest tokens of each row that `advance` needs."""

    def advance(self, candidates: Mapping[int, Candidates], command: Callable[[Any], Any]) -> list[int]:
        """Choose the rows of the next step from the likeliest tokens of each choice, after all rules, and put them into
        slots by commands (`dtgpt.inference.commands`). Return their choices; none: the search is over."""

    def events(self, handle: int) -> list["Event"]:
        """Return an event for each sequence that the request asks for, the best first."""


class Event(NamedTuple):
    """New tokens of a choice, or the scores of a prompt."""

    request: int  # the handle that `Engine.submit` returned
    choice: int  # from 0; PROMPT: the scores of the prompt, before any other event of the request
    ids: list[int]  # new tokens, that which ended the sequence included; of a prompt, all but its first token
    logprobs: list[float]  # of each of `ids`, without filters, at temperature 1
    alternatives: list[list[tuple[int, float]]]  # for each of `ids`, the likeliest tokens and their log-probabilities
    finish: str | None = None  # in the last event of a choice: "stop", "length", "cancelled" or NOT_FINITE
    greedy: tuple[bool, ...] = ()  # of a prompt, whether each of `ids` is the likeliest token
    score: float | None = None  # of a sequence that a search found, all in one event, the best in choice 0


PROMPT = -1
NOT_FINITE = "not_finite"  # the end of all of a request: the model's logits are NaN or infinite
