"""The option of a prompt that asks for its scores, and what is returned then."""

from dataclasses import dataclass, field
from typing import Annotated

from dtgpt.inference.base_options import BaseOptions


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(BaseOptions):
    """The option, as it is declared."""

    prompt_logprobs: Annotated[bool, "return the log-probabilities of the prompt's tokens"] = False

    @property
    def answers_by_prompt(self) -> bool:
        return self.prompt_logprobs or super().answers_by_prompt


@dataclass(kw_only=True)
class Score:
    """The log-probabilities of a text under the model."""

    ids: list[int]
    logprobs: list[float]  # of each of `ids[1:]`, natural logarithm, at temperature 1
    greedy: list[bool]  # whether each of `ids[1:]` is the likeliest token
    alternatives: list[list[tuple[int, float]]] = field(
        default_factory=list
    )  # in place of each of `ids[1:]`, where asked for

    @property
    def total(self) -> float:
        """The log-probability of all tokens after the first."""
        return sum(self.logprobs)
