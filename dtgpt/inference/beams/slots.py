"""A beam search in slots of the cache: one for each row, which are copied as the search chooses."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dtgpt.inference.beams.search import Beams, BeamSearch
from dtgpt.inference.commands import Assign, Copy
from dtgpt.inference.request import Candidates, Event, Request


class BeamSlots:
    """The rows of a request's beam search. `slots[i]` is that of the request's choice i, of which some may be idle."""

    def __init__(self, beams: Beams, asked: Request, slots: list[int]):
        self.asked, self.slots = asked, slots
        self.search = BeamSearch(beams, asked.sampling.max_new_tokens, asked.stop_ids)
        self._choices = [0]  # of the rows of the search, in their order

    @property
    def alternatives(self) -> int:
        """The number of likeliest tokens of each row that `advance` needs."""
        return self.search.alternatives

    def advance(self, candidates: Mapping[int, Candidates], command: Callable[[Any], Any]) -> list[int]:
        """Choose the rows of the next step from the likeliest tokens of each choice, and put them into slots. Return
        their choices; none: the search is over.

        The first row that continues another one stays in its slot, and the others are copied to idle slots: nothing is
        overwritten that is still read.
        """
        rows = self.search.advance([candidates[choice] for choice in self._choices])
        sources = [self._choices[row.source] for row in rows]
        idle = [choice for choice in range(len(self.slots)) if choice not in sources]
        copies: dict[int, int] = {}  # target -> source
        chosen = []
        for source in sources:
            target = source if source not in chosen else idle.pop()
            if target != source:
                copies[target] = source
            chosen.append(target)
        if copies:
            filled = len(self.asked.ids) + self.search.length - 1  # the last token is not in the cache yet
            command(Copy(self._slots(copies.values()), self._slots(copies), filled))
        if rows:
            command(Assign(self._slots(chosen), [row.token for row in rows]))
        self._choices = chosen
        return chosen

    def events(self, handle: int) -> list[Event]:
        """Return an event for each sequence that the request asks for, the best first."""
        best = self.search.hypotheses[: self.asked.choices]
        events = [
            Event(handle, choice, found.ids, found.logprobs, [], "stop" if found.ended else "length", score=found.score)
            for choice, found in enumerate(best)
        ]
        # Where rules leave few tokens, fewer sequences may have been found.
        missing = range(len(best), self.asked.choices)
        return events + [Event(handle, choice, [], [], [], "length", score=-math.inf) for choice in missing]

    def _slots(self, choices: Iterable[int]) -> list[int]:
        return [self.slots[choice] for choice in choices]
