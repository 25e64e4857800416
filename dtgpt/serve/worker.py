"""The engine's thread and the event loop's: requests go one way, new tokens the other.

The main thread runs `EngineWorker.run`: it takes what was submitted, lets the engine step, and hands all updates of a
round over in one call. Everything else is for event loops.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from dtgpt.inference.engine import Engine
from dtgpt.inference.request import LOGITS, NOT_FINITE, PromptJob, SequenceUpdate
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.metrics import Metrics
from dtgpt.serve.problems import HttpProblem, bad_request, without_folders
from dtgpt.serve.ticket import Ticket
from dtgpt.serve.weights import WEIGHTS, has_finite_weights
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

HEARTBEAT = 5.0  # seconds without work after which the other ranks must answer a ping

Command = Callable[[Engine], None]


class Refused(HttpProblem):
    """A request that the server does not take now: its queue is full, or it ends."""

    def __init__(self, status: int, message: str, retry_after: int):
        super().__init__(status, message, headers={"Retry-After": str(retry_after)})


class EngineFailed(HttpProblem):
    """A request whose engine has failed."""

    def __init__(self, cause: str):
        super().__init__(500, f"the engine has failed ({without_folders(cause)}); the server ends")


class NotFiniteProblem(HttpProblem):
    """A request that ends at logits which are not finite, or whose model has such weights."""

    def __init__(self, status: int, sentence: str):
        super().__init__(status, sentence, headers={"x-should-retry": "false"}, code="not_finite")


class _Place(NamedTuple):
    """Which job of which ticket a job of the engine is."""

    ticket: Ticket
    job: int


@dataclass(frozen=True)
class Status:
    """What a server is doing."""

    state: str  # "starting", "ready", "draining", "stalled", "not_finite" or "failed"
    waiting: int  # rows for which there is no slot
    running: int  # all others
    slots: int
    clients: dict[str, int]  # rows of each one that has any

    @property
    def healthy(self) -> bool:
        return self.state == "ready"


class EngineWorker:
    """Jobs of all requests, on one engine. `slots`: of its cache. `check`: raises UserError for a job that
    can never be done."""

    def __init__(
        self,
        check: Callable[[PromptJob], None],
        slots: Callable[[], int],
        limits: RequestLimits | None = None,
        metrics: Metrics | None = None,
    ):
        self.limits, self.metrics = limits or RequestLimits(), metrics or Metrics()
        self._check, self._slots = check, slots
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._tickets: set[Ticket] = set()  # that are not finished, for event loops
        self._rows: Counter[str] = Counter()  # of these, by client
        self._state = "starting"
        self._cause = ""
        # Of the main thread:
        self._places: dict[int, _Place] = {}  # by number in the engine
        self._deadline: float | None = None  # when what still runs ends with what it has
        self._since: float | None = None  # when the step or ping began that is under way
        self._finite_weights: bool | None = None  # None: nothing has made them doubtful

    # For event loops

    def submit(self, jobs: list[PromptJob]) -> Ticket:
        """Hand the jobs of a client's request to the engine. Raise UserError for a job that can never be done, Refused
        where the queue is full, and the client has its share of it, or where the server does not take requests."""
        if self._state != "ready":
            raise self._refusal()
        for job in jobs:
            self._check(job)
            if job.rows > self._slots():
                raise UserError(
                    f"{counted(job.rows, 'sequence')} of one prompt are more than the {self._slots()} that this server "
                    "generates at the same time; ask for fewer"
                )
        rows, limit = sum(job.rows for job in jobs), self.limits.queue
        if rows > limit:
            raise UserError(f"the request asks for {rows:,} sequences; ask for {limit:,} at most")
        client = jobs[0].client
        whole, fair = self._rows.total(), limit // len(self._rows.keys() | {client})
        if whole + rows > limit and self._rows[client] + rows > fair:
            sentence = f"{counted(whole, 'sequence')} are waiting or running, and the server takes {limit:,} at most"
            raise Refused(429, f"{sentence}; ask again later", self.limits.retry_after)
        ticket = Ticket(jobs, self.limits.seconds, self.metrics, self._end)
        self._tickets.add(ticket)
        self._rows[client] += rows
        self.metrics.prompt_tokens.add(ticket.prompt_tokens)
        self._commands.put(lambda engine: self._begin(engine, ticket))
        return ticket

    @property
    def ending(self) -> HttpProblem | None:
        """The answer to new requests of a server that ends, None before: their bodies need not be read."""
        return self._refusal() if self._state == "draining" else None

    def _refusal(self) -> HttpProblem:
        if self._state == "failed":
            return EngineFailed(self._cause)
        if self._state == NOT_FINITE:
            return NotFiniteProblem(503, WEIGHTS)
        if self._state == "starting":
            return Refused(503, "the server is starting; ask again later", self.limits.retry_after)
        return Refused(503, "the server is ending and takes no new requests; ask another one", self.limits.retry_after)

    def _end(self, ticket: Ticket, finished: bool) -> None:
        """Forget a ticket, and end its jobs unless they are finished."""
        self._tickets.discard(ticket)
        self._rows -= Counter({ticket.jobs[0].client: ticket.rows})  # which forgets a client without any
        self.metrics.new_tokens.add(ticket.new_tokens)
        if not finished:
            self._commands.put(lambda engine: self._stop(engine, ticket))

    def status(self) -> Status:
        """Return the state and the numbers of rows."""
        rows = self._rows.total()
        running = min(rows, self._slots())
        state = self._state
        if state == "ready" and self.seconds_under_way() > self.limits.stalled:
            state = "stalled"
        return Status(state, rows - running, running, self._slots(), dict(self._rows))

    def seconds_under_way(self) -> float:
        """Return for how long a step or a ping of the engine has been under way, whether a client waits or not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def abandon(self, cause: str) -> None:
        """Answer all requests that the engine has failed, where its thread cannot, and end the process a second later
        with code 1."""
        self._state, self._cause = "failed", cause
        for ticket in list(self._tickets):
            ticket.fail(EngineFailed(cause))
        asyncio.get_running_loop().call_later(1.0, os._exit, 1)

    # For any thread, and for signal handlers: `SimpleQueue.put` may interrupt itself

    def drain(self, seconds: float) -> None:
        """Take no new requests. What is running ends within `seconds` with what it has, a request that has nothing yet
        by `Refused`; then `run` returns."""
        if self._state in ("ready", NOT_FINITE):  # at once: the engine may be amid a round
            self._state = "draining"
        self._commands.put(lambda engine: self._drain(seconds))

    def stop(self) -> None:
        """End everything at the next round with what it has, and return from `run`."""
        self.drain(0.0)

    # The main thread

    def run(self, engine: Engine, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `drain` or `stop` was called and everything has ended. `ready` is called once, when requests are
        taken."""
        self._state = "ready"
        try:
            ready()
            while self._deadline is None or self._places:
                self._work(engine)
            self._since = None
            self._fail_tickets(self._refusal())  # those that were submitted at the very end
        except BaseException as error:
            self._state, self._cause = "failed", str(error) or repr(error)
            self._fail_tickets(EngineFailed(self._cause))
            raise

    def _work(self, engine: Engine) -> None:
        """Take commands, and let the engine take a step; where there is nothing to do, wait."""
        self._take_commands(engine)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for number in list(self._places):
                engine.cancel(number)
        if engine.busy:
            begin = self._since = time.monotonic()
            updates = engine.step()
            self._since = time.monotonic()
            self.metrics.round_seconds.observe(self._since - begin)
            self._hand_over(engine, updates)

    def _take_commands(self, engine: Engine) -> None:
        """Execute what was put into the queue. Wait for it where the engine has nothing to do."""
        if not engine.busy and self._deadline is None:
            command: Command = _ping  # nobody else would notice a rank that hangs while nothing is asked
            self._since = None
            with suppress(Empty):
                command = self._commands.get(timeout=HEARTBEAT)
            self._since = time.monotonic()
            command(engine)
        while True:
            try:
                self._commands.get_nowait()(engine)
            except Empty:
                return

    def _begin(self, engine: Engine, ticket: Ticket) -> None:
        """Hand the jobs of a ticket to the engine."""
        for index, job in enumerate(ticket.jobs):
            try:
                number = engine.submit(job)
            except UserError as error:  # which `submit` should have found
                return _call(ticket.loop, ticket.fail, bad_request(error))
            self._places[number] = _Place(ticket, index)

    def _stop(self, engine: Engine, ticket: Ticket) -> None:
        for number, place in self._places.items():
            if place.ticket is ticket:
                engine.cancel(number)

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = min(deadline, self._deadline or deadline)
        self._state = "draining"

    def _doubt_weights(self, engine: Engine) -> None:
        """Take no new requests where logits are not finite because the weights are not."""
        if self._finite_weights is None:
            self._finite_weights = has_finite_weights(engine.stages, engine.mesh, engine.config)
            if not self._finite_weights and self._state == "ready":
                self._state = NOT_FINITE

    def _hand_over(self, engine: Engine, updates: list[SequenceUpdate]) -> None:
        """Give the updates of a round to the tickets, with one call for each event loop."""
        batches: dict[asyncio.AbstractEventLoop, dict[Ticket, list[SequenceUpdate]]] = {}
        for update in updates:
            ticket, job = self._places[update.job]
            if update.completions is not None:
                del self._places[update.job]
            if update.finish == NOT_FINITE:
                self._doubt_weights(engine)
                _call(ticket.loop, ticket.fail, NotFiniteProblem(500, LOGITS))
            if _has_nothing(update):
                _call(ticket.loop, ticket.fail_without_tokens, self._refusal())
            own = batches.setdefault(ticket.loop, {}).setdefault(ticket, [])
            own.append(_ended(update._replace(job=job)))
        for loop, batch in batches.items():
            _call(loop, _deliver, batch)

    def _fail_tickets(self, error: HttpProblem) -> None:
        for ticket in list(self._tickets):
            _call(ticket.loop, ticket.fail, error)


def _ping(engine: Engine) -> None:
    engine.ping()


def _deliver(batch: dict[Ticket, list[SequenceUpdate]]) -> None:
    for ticket, updates in batch.items():
        ticket.take(updates)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function on an event loop, or here where the loop has ended: nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        function(*arguments)


def _has_nothing(update: SequenceUpdate) -> bool:
    """Return whether the server ended a job before its first token: an answer without text would look complete."""
    completions = update.completions
    return update.finish == "cancelled" and completions is not None and not any(found.ids for found in completions)


def _ended(update: SequenceUpdate) -> SequenceUpdate:
    """Return an update whose sequences, where the server ended them, have ended for their length."""
    if update.finish == "cancelled":
        update = update._replace(finish="length")
    if update.completions is not None:
        ended = [
            replace(c, finish_reason="length") if c.finish_reason == "cancelled" else c for c in update.completions
        ]
        update = update._replace(completions=ended)
    return update
