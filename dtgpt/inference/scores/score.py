"""What is returned of a text that is scored."""

from dataclasses import dataclass, field

from dtgpt.inference.request import Alternatives


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
