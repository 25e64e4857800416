"""Which request gets which slot, and what the next round computes. Plain Python: no tensor, no clock.

It has neither so that its decisions can be tested without a model, and are the same in every run.

A request waits until it has a slot for each of its choices, in order of arrival. Its prompt is prefilled once, in
chunks that are cut at fixed positions; then its choices run, one row of a decode step each, until they are finished or
cancelled. A slot holds a whole sequence, so that nothing that runs is ever interrupted.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from dtgpt.util import seams

CHUNK = 2048  # tokens between the cuts of a prompt, and most tokens of prompts in a round that decodes
IDLE_TOKENS = 16384  # most tokens of prompts in a round where nothing decodes, if several are read in a pass
LONGEST_ROUND = 8  # most decode steps of a round


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
    """Work to launch, in this order: chunks of prompts, starts of requests, `steps` decode steps of `rows`."""

    chunks: list[PromptChunk]
    starts: list[Start]
    rows: list[Row]
    steps: int


@dataclass(eq=False)
class Queued:
    """A request before its choices run."""

    request: int
    prefill: int  # tokens of the prompt to prefill
    new_tokens: int
    choices: int
    asked: Any  # what is known of it beside these numbers, such as a `PromptJob`
    slots: list[int] = field(default_factory=list)  # as many as choices; the first one is prefilled
    done: int = 0  # tokens prefilled


@dataclass
class Running:
    """A choice that has begun."""

    row: Row
    left: int  # decode steps that are not launched yet
    asked: Any


class Scheduler:
    """Waiting requests, running choices and free slots. Capabilities may have other turns: `Scheduler(...)` is an
    object of their classes, too."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        return super().__new__(seams.with_kinds("schedulers", cls) if cls is Scheduler else cls)

    def __init__(
        self, slots: int, chunk: int = CHUNK, longest_round: int = LONGEST_ROUND, idle_tokens: int | None = None
    ):
        """Take `slots` free slots. `idle_tokens`: most tokens of prompts in a round where nothing decodes, at least
        `chunk`; None: as many as in other rounds."""
        self._free = list(reversed(range(slots)))
        self._chunk, self._longest_round, self._idle_tokens = chunk, longest_round, max(chunk, idle_tokens or 0)
        self._waiting: list[Queued] = []
        self._prefilling: list[Queued] = []
        self._running: dict[tuple[int, int], Running] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, request: int, prefill: int, choices: int, new_tokens: int, asked: Any = None) -> None:
        """Take a request of `choices` rows, at most as many as there are slots. `prefill`: tokens of its prompt that
        are not fed to a decode step. `asked`: what else is known of it."""
        self._waiting.append(Queued(request, prefill, new_tokens, choices, asked))

    def finish(self, request: int, choice: int) -> None:
        """Free the slot of a choice that has begun."""
        self._free.append(self._running.pop((request, choice)).row.slot)

    def cancel(self, request: int) -> None:
        """End what is left of a request, at any time."""
        for key in [key for key in self._running if key[0] == request]:
            self.finish(*key)
        for jobs in (self._waiting, self._prefilling):
            for job in [job for job in jobs if job.request == request]:
                self._free += job.slots
                jobs.remove(job)

    def next_round(self) -> Round | None:
        """Return what to launch next, and count it as launched; None where all that is left waits for results."""
        self._admit()
        chunks, starts = self._take_chunks(), self._start()
        ready = [running for running in self._running.values() if running.left]
        if not (chunks or starts or ready):
            return None
        # Long rounds would delay prompts that are being read, and what the host chooses. A request that waits for a
        # slot does not shorten rounds: nothing ends earlier for it, and a full server would send every token alone.
        at_once = starts or self._prefilling or self.waits_for_host
        steps = min(1 if at_once else self._longest_round, max((running.left for running in ready), default=0))
        for running in ready:
            new = min(steps, running.left)
            running.left -= new
            self._count(running.asked, new)
        return Round(chunks, starts, [running.row for running in ready], steps)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host chooses after each step how some rows go on."""
        return False

    def _first(self) -> Queued:
        """Return which of the waiting requests is the next one."""
        return self._waiting[0]

    def _take(self, job: Queued) -> None:
        """Let a request wait no longer."""
        self._waiting.remove(job)

    def _count(self, asked: Any, tokens: int) -> None:
        """Take note of tokens that are read or generated for a request."""

    def _admit(self) -> None:
        while self._waiting:
            job = self._first()
            if job.choices > len(self._free):
                return
            self._take(job)
            job.slots = [self._free.pop() for _ in range(job.choices)]
            self._prefilling.append(job)

    def _take_chunks(self) -> list[PromptChunk]:
        """Take chunks, together of no more tokens than one chunk may have, so that sequences which decode wait for no
        more than that. Where a prompt is cut does not depend on other requests."""
        chunks: list[PromptChunk] = []
        decoding = self.waits_for_host or any(running.left for running in self._running.values())
        budget = self._chunk if decoding else self._idle_tokens
        for job in self._prefilling:
            while job.done < job.prefill:
                stop = min(job.done + self._chunk, job.prefill)
                budget -= stop - job.done
                if budget < 0:
                    return chunks
                chunks.append(PromptChunk(job.request, job.slots[0], job.done, stop))
                self._count(job.asked, stop - job.done)
                job.done = stop
        return chunks

    def _start(self) -> list[Start]:
        starts = []
        while self._prefilling and self._prefilling[0].done == self._prefilling[0].prefill:
            job = self._prefilling.pop(0)
            starts.append(Start(job.request, job.slots))
            for choice, slot in enumerate(job.slots):
                row = Row(job.request, choice, slot)
                self._running[row[:2]] = Running(row, job.new_tokens, job.asked)
        return starts
