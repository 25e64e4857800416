"""Which request gets which slot, and what the next round computes. Plain Python: no tensor, no clock.

It has neither so that its decisions can be tested without a model, and are the same in every run.

A request waits until it has a slot for each of its choices: those of a client in order of arrival, and next the client
for which the fewest tokens were read and generated (the virtual token counter of Sheng et al., 2024). Its prompt is
prefilled once, in chunks that are cut at fixed positions; then its choices run, one row of a decode step each, until
they are finished or cancelled. A slot holds a whole sequence, so that nothing that runs is ever interrupted.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

CHUNK = 2048  # tokens between the cuts of a prompt, and most tokens of prompts in a round that decodes
IDLE_TOKENS = 16384  # most tokens of prompts in a round where nothing decodes, if several are read in a pass
LONGEST_ROUND = 8  # most decode steps of a round
MOST_CLIENTS = 1000  # whose tokens are kept; of more, those without a request begin anew


class PromptChunk(NamedTuple):
    """Positions `first` to `stop` of a prompt, to be prefilled in `slot`."""

    request: int
    slot: int
    first: int
    stop: int


class Start(NamedTuple):
    """A request whose prompt is prefilled in the first of `slots`; its choices run from now on, one in each slot."""

    request: int
    slots: list[int]


class Row(NamedTuple):
    """A choice that takes part in a decode step."""

    request: int
    choice: int
    slot: int


class Round(NamedTuple):
    """Work to launch, in this order: chunks of prompts, starts of requests, `steps` decode steps of `rows`, one decode
    step of `searched`."""

    chunks: list[PromptChunk]
    starts: list[Start]
    rows: list[Row]
    steps: int
    searched: tuple[Row, ...] = ()


@dataclass
class _Job:
    """A request before its choices run."""

    request: int
    prefill: int  # tokens of the prompt to prefill
    new_tokens: int
    choices: int
    searches: bool  # whether the host chooses after each step how the choices go on
    waits: bool  # whether each step waits for what the host knows after the last one
    client: str
    slots: list[int] = field(default_factory=list)  # as many as choices; the first one is prefilled
    done: int = 0  # tokens prefilled


@dataclass
class _Running:
    """A choice that has begun."""

    row: Row
    left: int  # decode steps that are not launched yet
    searches: bool  # whether the host chooses after each step how it goes on
    waits: bool  # whether each step waits for what the host knows after the last one
    client: str


class Scheduler:
    """Waiting requests, running choices and free slots."""

    def __init__(
        self, slots: int, chunk: int = CHUNK, longest_round: int = LONGEST_ROUND, idle_tokens: int | None = None
    ):
        """Take `slots` free slots. `idle_tokens`: most tokens of prompts in a round where nothing decodes, at least
        `chunk`; None: as many as in other rounds."""
        self._free = list(reversed(range(slots)))
        self._chunk, self._longest_round, self._idle_tokens = chunk, longest_round, max(chunk, idle_tokens or 0)
        self._waiting: dict[str, deque[_Job]] = {}  # by client
        self._tokens: dict[str, int] = {}  # of each client, from where others were when it came
        self._fewest = 0  # tokens of the client that was admitted last
        self._prefilling: list[_Job] = []
        self._running: dict[tuple[int, int], _Running] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._prefilling or self._running)

    def add(
        self,
        request: int,
        prefill: int,
        choices: int,
        new_tokens: int,
        searches: bool = False,
        client: str = "",
        waits: bool = False,
    ) -> None:
        """Take a request of `choices` rows, at most as many as there are slots. `prefill`: tokens of its prompt that
        are not fed to a decode step. `searches`: the host searches with these rows. The first step has the first row
        alone. `waits`: each step but the first waits for `go_on`, as those of a search do. `client`: who shares the
        slots fairly with others."""
        # Clients come and go for days: of many, only those with a request are remembered.
        if len(self._tokens) > MOST_CLIENTS:
            at_work = {job.client for job in self._prefilling} | {row.client for row in self._running.values()}
            self._tokens = {name: self._tokens[name] for name in at_work | self._waiting.keys()}
        if client not in self._waiting:  # who did not wait has no claim to what others used meanwhile
            self._tokens[client] = max(self._fewest, self._tokens.get(client, 0))
        job = _Job(request, prefill, new_tokens, choices, searches, waits or searches, client)
        self._waiting.setdefault(client, deque()).append(job)

    def go_on(self, request: int, choices: list[int]) -> None:
        """Let these rows, whose steps wait, take the next one."""
        for choice in choices:
            self._running[request, choice].left = 1

    def finish(self, request: int, choice: int) -> None:
        """Free the slot of a choice that has begun."""
        self._free.append(self._running.pop((request, choice)).row.slot)

    def cancel(self, request: int) -> None:
        """End what is left of a request, at any time."""
        for key in [key for key in self._running if key[0] == request]:
            self.finish(*key)
        for jobs in (*self._waiting.values(), self._prefilling):
            for job in [job for job in jobs if job.request == request]:
                self._free += job.slots
                jobs.remove(job)
        self._waiting = {name: jobs for name, jobs in self._waiting.items() if jobs}

    def next_round(self) -> Round | None:
        """Return what to launch next, and count it as launched; None where all that is left waits for results."""
        self._admit()
        chunks, starts = self._take_chunks(), self._start()
        ready = [running for running in self._running.values() if running.left]
        searched = [running for running in ready if running.searches]
        others = [running for running in ready if not running.searches]
        # Long rounds would delay prompts that are being read, and each step that waits. A request that waits for
        # a slot does not shorten rounds: nothing ends earlier for it, and a full server would send every token alone.
        waiting = any(running.waits for running in self._running.values())
        at_once = starts or self._prefilling or waiting
        steps = min(1 if at_once else self._longest_round, max((running.left for running in others), default=0))
        for running in ready:
            new = 1 if running.waits else min(steps, running.left)
            running.left -= new
            self._tokens[running.client] += new
        if not (chunks or starts or ready):
            return None
        rows = [running.row for running in others]
        return Round(chunks, starts, rows, steps, tuple(running.row for running in searched))

    def _admit(self) -> None:
        while self._waiting:
            client = min(self._waiting, key=self._tokens.__getitem__)
            jobs = self._waiting[client]
            if jobs[0].choices > len(self._free):
                return
            job = jobs.popleft()
            if not jobs:
                del self._waiting[client]
            self._fewest = self._tokens[client]
            job.slots = [self._free.pop() for _ in range(job.choices)]
            self._prefilling.append(job)

    def _take_chunks(self) -> list[PromptChunk]:
        """Take chunks, first of the client with the fewest tokens, together of no more tokens than one chunk may have,
        so that sequences which decode wait for no more than that. Where a prompt is cut does not depend on other
        requests."""
        chunks: list[PromptChunk] = []
        decoding = any(running.left or running.waits for running in self._running.values())
        budget = self._chunk if decoding else self._idle_tokens
        self._prefilling.sort(key=lambda job: self._tokens[job.client])
        for job in self._prefilling:
            while job.done < job.prefill:
                stop = min(job.done + self._chunk, job.prefill)
                budget -= stop - job.done
                if budget < 0:
                    return chunks
                chunks.append(PromptChunk(job.request, job.slots[0], job.done, stop))
                self._tokens[job.client] += stop - job.done
                job.done = stop
        return chunks

    def _start(self) -> list[Start]:
        starts = []
        while self._prefilling and self._prefilling[0].done == self._prefilling[0].prefill:
            job = self._prefilling.pop(0)
            starts.append(Start(job.request, job.slots))
            for choice, slot in enumerate(job.slots):
                row = Row(job.request, choice, slot)
                begins = slot == job.slots[0] or not job.searches
                left = int(begins) if job.waits else job.new_tokens
                self._running[row[:2]] = _Running(row, left, job.searches, job.waits, job.client)
        return starts
