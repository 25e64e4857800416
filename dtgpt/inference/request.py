"""What is asked of the engine, and what it answers: a prompt with its options, events of its sequences, results.

These types stand apart from the engine, since the scheduler, the server and whoever asks need them and nothing else of
it.

A `PromptJob` is all that is known of a prompt from the call of a user to the end of its last sequence. The engine
answers with a `SequenceUpdate` for each of its sequences that got new tokens, the last with a `Completion` of each.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.options import Options
from dtgpt.ops.random.philox import fold_words
from dtgpt.ops.sampling.sequences import Variant
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Is, Missing, Other, Rule, Rules, check_rules

NOT_FINITE = "not_finite"  # the end of all of a request: the model's logits are NaN or infinite
REMEDY = "dtgpt inspect names weights that are not finite: use an earlier checkpoint, or another --precision"
LOGITS = f"the model's logits are not finite, so that no token can be drawn or scored; {REMEDY}"
Alternatives = list[tuple[int, float]]  # the likeliest (id, log-probability) in place of a token, best first


class NotFinite(UserError):
    """Logits that are NaN or infinite. The engine and the other ranks can go on."""

    def __init__(self) -> None:
        super().__init__(LOGITS)


NO_SPECIAL_IDS = SpecialIds()
LENGTHS: Rules = (  # of options, for a prompt: `whole`: all positions that it needs; `left`: those that it leaves
    Rule(
        "{given} does not fit into the model's {positions} positions; use a shorter one",
        Is("whole", ">", Other("positions")),
        Is("max_new_tokens", "==", 0),
    ),
    Rule(
        "{given} and max_new_tokens={max_new_tokens} need {whole} positions, but the model has {positions}; use "
        "max_new_tokens={left} or less, or a shorter prompt",
        Is("whole", ">", Other("positions")),
        Is("left", ">", 0),
    ),
    Rule(
        "{given} and max_new_tokens={max_new_tokens} need {whole} positions, but the model has {positions}; use a "
        "shorter prompt",
        Is("whole", ">", Other("positions")),
    ),
    Rule(
        "max_new_tokens=0 generates nothing; use 1 or more, or ask for scores of the prompt",
        Is("max_new_tokens", "==", 0),
        Missing("answers_by_prompt"),
    ),
)


@dataclass(frozen=True)
class PromptJob:
    """A prompt and what is wanted of it."""

    ids: list[int]
    options: Options
    prompt_index: int = 0  # enters the draws: equal prompts get different texts
    client: str = ""  # who shares the slots fairly with others
    stops: tuple[str, ...] = ()  # of a chat's template, besides those of the options
    special: SpecialIds = NO_SPECIAL_IDS  # of the tokenizer

    @property
    def choices(self) -> int:
        """The number of sequences that go on from the prompt."""
        return self.options.num_return_sequences

    @property
    def rows(self) -> int:
        """The slots of the cache that it takes at once."""
        return self.options.rows

    def validate(self, vocab_size: int, positions: int, slots: int) -> None:
        """Raise UserError for a request that no engine of these sizes can serve."""
        check_prompt(self.ids, vocab_size)
        self.options.validate(vocab_size, positions)
        length = len(self.ids)
        whole, sizes = length + self.options.max_new_tokens, {"positions": positions, "left": positions - length}
        check_rules(LENGTHS, self.options, given=f"a prompt of {counted(length, 'token')}", whole=whole, **sizes)
        self.options.check_job(self, vocab_size)
        if not 1 <= self.rows <= slots:
            raise UserError(
                f"{self.options.counted_rows} of a prompt need as many slots of the cache, which has "
                f"{slots}; use 1 to {slots}, or more slots"
            )

    def accept(self, new: list[int], tokens: list[int], logprobs: list[float]) -> tuple[int, str | None]:
        """Return how many of `tokens`, whose `logprobs` these are, continue a sequence that has `new` ones, and the
        reason of its end, None where it goes on. NOT_FINITE: a log-probability is NaN."""
        left = self.options.max_new_tokens - len(new)
        if self._decisive_ids.isdisjoint(tokens) and math.isfinite(sum(logprobs)):  # the length alone can end it
            return min(left, len(tokens)), "length" if left <= len(tokens) else None
        ids = [*new]
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if math.isnan(logprob):
                return place, NOT_FINITE
            if self.options.bans_all(self.special, self.ids, ids, token, logprob):
                return place, "length"
            before = ids[-1] if ids else self.ids[-1]
            ids.append(token)
            if self.options.ends_at(self.special, before, token, len(ids) - 1):
                return place + 1, "stop"
            if place + 1 == left:
                return left, "length"
        return len(tokens), None

    @cached_property
    def _decisive_ids(self) -> frozenset[int | None]:
        return frozenset(self.options.decisive_ids(self.special))


def variant_of(samplings: Iterable[Options], alternatives: int = 0) -> Variant:
    """Return what a step must be able to do for these sequences."""
    found = [Variant(alternatives=alternatives), *(sampling.variant for sampling in samplings)]
    return Variant(*map(max, zip(*found, strict=True)))


def key_of(sampling: Options, prompt_index: int, choice: int) -> tuple[int, int]:
    """Return the two words of the key of a sequence's draws, which belong to (seed, prompt_index, choice)."""
    return fold_words(sampling.seed, "text", prompt_index, choice)


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


def alternatives_of(results: Any, count: int) -> list[Alternatives]:
    """Return the `count` likeliest tokens in place of each token of results, such as `Sampled`."""
    ids, logprobs = results.top_ids[:, :count].tolist(), results.top_logprobs[:, :count].tolist()
    return [list(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]


@dataclass(kw_only=True)
class Completion:
    """A continuation of a prompt."""

    text: str | None  # without the prompt, the end of text and a stop string; None without a tokenizer
    ids: list[int]  # new tokens, with the one that ends the sequence
    logprobs: list[float]  # of each of `ids`, natural logarithm, before filters and penalties, at temperature 1
    finish_reason: str  # "stop": by a token or a stop string; "length"; "cancelled"
    segments: list[str] | None = None  # each of `ids`, decoded alone; None without a tokenizer
    alternatives: list[Alternatives] = field(default_factory=list)  # in place of each of `ids`, where asked for
    prompt: Any = None  # the `Score` of the prompt, where asked for
    score: float | None = None  # of a beam

    @property
    def prompt_logprobs(self) -> list[float] | None:
        """The log-probabilities of all tokens of the prompt but the first, where they were asked for."""
        return None if self.prompt is None else self.prompt.logprobs


class SequenceUpdate(NamedTuple):
    """What a step of the engine added to a sequence."""

    job: int  # the number that `Engine.submit` returned
    choice: int  # from 0; of a search, 0 is the best
    ids: list[int]  # new tokens, with the one that ends the sequence
    text: str  # new text, whole characters alone; what may become a stop string is held back
    logprobs: list[float]  # of each of `ids`, before filters and penalties, at temperature 1
    alternatives: list[Alternatives]  # in place of each of `ids`, where asked for
    finish: (
        str | None
    )  # with the last update of a sequence: "stop", "length", "cancelled", or NOT_FINITE for all of a job
    prompt: Any  # the `Score` of the prompt with every update, where asked for
    completions: list[Completion] | None  # with the last update of a job, all of its sequences
