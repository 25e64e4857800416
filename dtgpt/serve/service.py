"""What all routes share: the model, the worker, and how a request is submitted, watched and logged."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.model import Model
from dtgpt.inference.request import PromptJob
from dtgpt.models.config import ModelConfig
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.log import log
from dtgpt.serve.metrics import Metrics
from dtgpt.serve.ticket import ClientGone, Ticket
from dtgpt.serve.worker import EngineWorker

TICKET = "dtgpt.ticket"  # of a request, in its ASGI scope
CLIENT: ContextVar[str] = ContextVar("client", default="")  # whose request is handled
LONG = 2000  # characters, ids or bytes from which on work leaves the event loop for a thread
LARGE = 2**15  # of these from which on the work has threads of its own: it may take a second
THREADS = {False: ThreadPoolExecutor(2, "requests"), True: ThreadPoolExecutor(2, "large requests")}
SIZE = "dtgpt.size"  # in the scope of a request: bytes of its body, or tokens of its answer
_busy: WeakValueDictionary[tuple[int, str, bool], asyncio.Lock] = WeakValueDictionary()  # by loop, client and size
_left: ContextVar[Callable[[], bool]] = ContextVar("left")  # whether the client has gone for which a thread works
SEED = "X-Seed"  # header of an answer: the seed that gives it again
SEEDS = 2**32  # of requests that name none


T = TypeVar("T")


async def in_thread(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` for a request, whose body has been read, in a thread and return its result, so that reading, encoding
    and writing long values do not block other requests. A client has one thread at a time, which leaves the other one
    to the rest. Raise ClientGone where the client goes away: the work does not begin then, or ends where it asks
    `client_has_left`."""
    loop, large, left = asyncio.get_running_loop(), request.scope.get(SIZE, 0) >= LARGE, threading.Event()

    def begin() -> T:
        if left.is_set():
            raise ClientGone
        return work(*arguments)

    async def run() -> T:
        _left.set(left.is_set)
        async with _busy.setdefault((id(loop), CLIENT.get(), large), asyncio.Lock()):  # until the thread is free
            return await loop.run_in_executor(THREADS[large], copy_context().run, begin)

    running, leaving = asyncio.create_task(run()), asyncio.create_task(until_gone(request))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not running.done():
            left.set()
            running.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody wants it
    if not running.done():
        raise ClientGone
    return running.result()


async def in_thread_if_long(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` for a request and return its result: here where the body or the answer, of which SIZE says how long it
    is, is short, else in a thread."""
    if request.scope[SIZE] < LONG:
        return work(*arguments)
    return await in_thread(request, work, *arguments)


def client_has_left() -> bool:
    """Return, in a thread that works for a request, whether its client has gone."""
    return _left.get()()


def draw_seed() -> int:
    """Return a seed for a request that names none."""
    return secrets.randbelow(SEEDS)


@dataclass
class Service:
    """A model that is served.

    hosts: names that a Host header may have; None: any. api_key: that every request but those for open paths must
    have, or several with commas in between, one for each client; None: none.
    """

    model: Model
    worker: EngineWorker
    model_id: str
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    log_requests: bool = True
    log_prompts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if (tokenizer := self.model.known_tokenizer) is not None:
            tokenizer.name = Path(tokenizer.name).name  # it may be a path, and sentences with it are told to clients

    @property
    def limits(self) -> RequestLimits:
        return self.worker.limits

    @property
    def metrics(self) -> Metrics:
        return self.worker.metrics

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises UserError where there is none."""
        return self.model.tokenizer

    def submit(
        self, request: Request, jobs: list[PromptJob], prompts: Sequence[Any] = (), quiet: bool = False
    ) -> Ticket:
        """Hand the jobs of a request to the worker; raise its problems. `prompts`: from the client, for the log of a
        server that writes prompts down, unless `quiet`."""
        ticket = self.worker.submit([replace(job, client=CLIENT.get()) for job in jobs])
        request.scope[TICKET] = ticket
        if self.log_prompts and not quiet:
            log(f"prompts {json.dumps(list(prompts))}")
        return ticket


async def until_gone(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def watched(request: Request, ticket: Ticket) -> AsyncIterator[Ticket]:
    """End the jobs of a request when its client goes away, also where nothing is streamed: whoever waits for them gets
    ClientGone. At the end of the block they are ended in any case."""

    async def watch() -> None:
        await until_gone(request)
        ticket.fail(ClientGone())

    task = asyncio.create_task(watch())
    try:
        yield ticket
    finally:
        ticket.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
