"""The jobs of one HTTP request, for the event loop that reads their updates."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from dtgpt.inference.request import Completion, PromptJob, SequenceUpdate
from dtgpt.serve.metrics import Metrics
from dtgpt.serve.problems import HttpProblem


class TimeLimit(HttpProblem):
    """A request that was not finished in time."""

    def __init__(self, seconds: float):
        sentence = f"the request was not finished within {seconds:g} s; ask for fewer tokens, or for less at once"
        super().__init__(504, sentence, headers={"x-should-retry": "false"})


class ClientGone(HttpProblem):
    """A request whose client has closed the connection: nobody reads its answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection before the answer was complete")


class Ticket:
    """The jobs of one HTTP request, for the event loop that submitted them."""

    def __init__(
        self, jobs: list[PromptJob], seconds: float, metrics: Metrics, ended: Callable[["Ticket", bool], None]
    ):
        """seconds: the time limit. ended: is called once, when all jobs have ended, or when nobody wants the rest of
        them; its second argument says which."""
        self.jobs = jobs
        self.rows = sum(job.rows for job in jobs)
        self.prompt_tokens = sum(len(job.ids) for job in jobs)
        self.new_tokens = 0
        self.started = time.monotonic()
        self.first: float | None = None  # when the first update arrived
        self.loop = asyncio.get_running_loop()
        self._metrics, self._ended = metrics, ended
        self._updates: list[SequenceUpdate] = []
        self._left = len(jobs)
        self._error: HttpProblem | None = None
        self._news = asyncio.Event()
        self._wakes = True  # whoever reads the updates, at each round; else at the end
        self._timer = self.loop.call_later(seconds, self.fail, TimeLimit(seconds))

    async def rounds(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Yield the new updates, those of one round or of several if they came faster than they are read. The `job` of
        an update is its index in the request. Raise EngineFailed, TimeLimit or ClientGone."""
        try:
            while self._left or self._updates or self._error:
                await self._news.wait()
                if self._error is not None:
                    raise self._error
                updates, self._updates = self._updates, []
                self._news.clear()
                yield updates
        finally:
            self.cancel()

    async def completions(self) -> list[list[Completion]]:
        """Return the sequences of each job, when all are finished."""
        found: list[list[Completion]] = [[] for _ in self.jobs]
        self._wakes = False
        async for updates in self.rounds():
            for update in updates:
                if update.completions is not None:
                    found[update.job] = update.completions
        return found

    def cancel(self) -> None:
        """End all jobs that are not finished; their slots are free at the next round. May be called again."""
        self._timer.cancel()
        if self._left:
            self._left = 0
            self._ended(self, False)

    def fail(self, error: HttpProblem) -> None:
        """Let whoever reads the updates get `error`, and end all jobs."""
        if self._left and self._error is None:
            self._error = error
            self._news.set()
            self.cancel()

    def fail_without_tokens(self, error: HttpProblem) -> None:
        """Do what `fail` does where nothing was generated yet."""
        if not self.new_tokens:
            self.fail(error)

    def take(self, updates: list[SequenceUpdate]) -> None:
        """Keep the updates of a round, on the event loop."""
        if not self._left:  # nobody wants them
            return
        if self.first is None:
            self.first = time.monotonic()
            self._metrics.first_token.observe(self.first - self.started)
        self.new_tokens += sum(len(update.ids) for update in updates)
        self._updates += updates
        self._left -= sum(update.completions is not None for update in updates)
        if self._wakes or not self._left:
            self._news.set()
        if not self._left:
            self._timer.cancel()
            self._ended(self, True)
