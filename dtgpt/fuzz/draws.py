"""Random decisions by name. A decision is a function of (seed, index of the case, name) alone: neither the number of
cases nor a decision that is added later changes another one."""

from collections.abc import Sequence
from typing import TypeVar

from dtgpt.ops.random.philox import fold_words

Choice = TypeVar("Choice")


class Draws:
    """The decisions of case `index`. part: what the names of some of them begin with."""

    def __init__(self, seed: int, index: int, part: str = ""):
        self.seed, self.index, self.part = seed, index, part

    def below(self, name: str, count: int) -> int:
        """Return a whole number in [0, count)."""
        return fold_words(self.seed, "random case", self.index, self.part + name)[0] * count >> 32

    def between(self, name: str, first: int, last: int) -> int:
        """Return a whole number in [first, last]."""
        return first + self.below(name, last - first + 1)

    def pick(self, name: str, choices: Sequence[Choice]) -> Choice:
        return choices[self.below(name, len(choices))]

    def chance(self, name: str, one_in: int) -> bool:
        """Return True in one of `one_in` cases."""
        return self.below(name, one_in) == 0
