"""Results of generation and scoring."""

from dataclasses import dataclass, field
from typing import Any

Alternatives = list[tuple[int, float]]  # the likeliest (id, log-probability) in place of a token, best first


@dataclass(kw_only=True)
class Score:
    """The log-probabilities of a text under the model."""

    ids: list[int]
    logprobs: list[float]  # of each of `ids[1:]`, natural logarithm, at temperature 1
    greedy: list[bool]  # whether each of `ids[1:]` is the likeliest token
    alternatives: list[Alternatives] = field(default_factory=list)  # in place of each of `ids[1:]`, where asked for

    @property
    def total(self) -> float:
        """The log-probability of all tokens after the first."""
        return sum(self.logprobs)


@dataclass(kw_only=True)
class Completion:
    """A continuation of a prompt."""

    text: str | None  # without the prompt, the end of text and a stop string; None without a tokenizer
    ids: list[int]  # new tokens, with the one that ends the sequence
    logprobs: list[float]  # of each of `ids`, natural logarithm, before filters and penalties, at temperature 1
    finish_reason: str  # "stop": by a token or a stop string; "length"; "cancelled"
    segments: list[str] | None = None  # each of `ids`, decoded alone; None without a tokenizer
    alternatives: list[Alternatives] = field(default_factory=list)  # in place of each of `ids`, where asked for
    prompt: Score | None = None  # of the prompt, where asked for
    score: float | None = None  # of a beam

    @property
    def prompt_logprobs(self) -> list[float] | None:
        """The log-probabilities of all tokens of the prompt but the first, where they were asked for."""
        return None if self.prompt is None else self.prompt.logprobs


def to_plain(found: Completion | Score) -> dict[str, Any]:
    """Return texts, numbers, lists and dicts, from which `completion_of` or `score_of` makes the same again."""
    return {name: to_plain(value) if isinstance(value, Score) else value for name, value in vars(found).items()}


def completion_of(plain: dict[str, Any]) -> Completion:
    prompt = plain["prompt"]
    fields = {**plain, "alternatives": _alternatives(plain), "prompt": None if prompt is None else score_of(prompt)}
    return Completion(**fields)


def score_of(plain: dict[str, Any]) -> Score:
    return Score(**{**plain, "alternatives": _alternatives(plain)})


def _alternatives(plain: dict[str, Any]) -> list[Alternatives]:
    """Return alternatives as tuples, of which JSON makes lists."""
    return [[(i, logprob) for i, logprob in row] for row in plain["alternatives"]]
