"""An engine and a scheduler for jobs that ask for a search: the host chooses after each step how their rows go on.

The first step of a search has one row; each further step waits for the choice. The rows of searches are decoded apart
from others, since they need the likeliest tokens after all rules, and draw none.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dtgpt.inference.beams.search import BeamSlots
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import SequenceUpdate
from dtgpt.inference.scheduler import Row, Scheduler, Start
from dtgpt.inference.sequence import ActiveJob
from dtgpt.inference.step import Pending
from dtgpt.ops.sampling.sequences import Sampled, Variant


class Decoded(NamedTuple):
    """The results of a step that have not been read."""

    others: list[Row]
    drawn: Any  # for these
    searched: list[Row]
    candidates: Pending[Sampled] | None  # for these


class SearchScheduler(Scheduler):
    """A scheduler of requests of which some search."""

    def go_on(self, request: int, choices: list[int]) -> None:
        """Let these rows of a search take the next step."""
        for choice in choices:
            self._running[request, choice].left = 1

    @property
    def waits_for_host(self) -> bool:
        return super().waits_for_host or any(_searches(running.asked) for running in self._running.values())

    def _start(self) -> list[Start]:
        starts = super()._start()
        for start in starts:
            rows = [self._running[start.request, choice] for choice, _ in enumerate(start.slots)]
            for place, running in enumerate(rows if _searches(rows[0].asked) else []):
                running.left = int(place == 0)
        return starts


class SearchEngine(Engine):
    """An engine for jobs of which some search."""

    def _forget(self) -> None:
        super()._forget()
        self._searches: dict[int, BeamSlots] = {}  # by number of the job, once it has started

    def drop(self, active: ActiveJob) -> None:
        super().drop(active)
        self._searches.pop(active.number, None)

    def _start(self, starts: Sequence[Start]) -> None:
        for start in starts:
            asked = self._active[start.request].job
            if _searches(asked):
                self._searches[start.request] = asked.options.search.begin(asked, start.slots)
        one_row = [start._replace(slots=start.slots[:1]) if self._is_searched(start) else start for start in starts]
        super()._start(one_row)

    def _is_searched(self, of: Start | Row) -> bool:
        return of.request in self._searches

    def _decode(self, rows: Sequence[Row], steps: int) -> Decoded:
        searched = [row for row in rows if self._is_searched(row)]
        others = [row for row in rows if not self._is_searched(row)]
        return Decoded(others, super()._decode(others, steps), searched, super()._decode(searched, 1))

    def _variant(self, rows: Sequence[Row]) -> Variant:
        return super()._variant(rows)._replace(candidates=any(map(self._is_searched, rows)))

    def _alternatives(self, active: ActiveJob) -> int:
        search = self._searches.get(active.number)
        return super()._alternatives(active) if search is None else search.alternatives

    def _extend_rows(self, rows: Sequence[Row], drawn: Any) -> list[SequenceUpdate]:
        updates = super()._extend_rows(drawn.others, drawn.drawn)
        if drawn.candidates is None:
            return updates
        results = drawn.candidates.wait()
        for number in dict.fromkeys(row.request for row in drawn.searched):
            active, search = self._active.get(number), self._searches.get(number)
            if active is not None and search is not None:
                own = {row.choice: index for index, row in enumerate(drawn.searched) if row.request == number}
                updates += search.advance(self, active, own, results)
        return updates


def _searches(asked: Any) -> bool:
    """Return whether a `PromptJob` asks for a search."""
    return asked is not None and asked.options.search is not None
