"""Tests of distributed code: processes that start once per pytest worker and run functions as the ranks of a group."""

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from dtgpt.fuzz.pool import Died, Worker
from tests.support.pictures import no_pictures

# Imported once, so that a rank is a quick fork; none of them starts a thread. The first DTensor would load dynamo.
PRELOADED = [
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.run",
    "torch.distributed.tensor.experimental", "torch.distributed.tensor.parallel", "einops", "safetensors.torch",
    "tiktoken_ext.openai_public", "starlette.applications", "starlette.routing", "uvicorn", "matplotlib.pyplot",
    "dtgpt.cli", "dtgpt.train.loop", "dtgpt.serve.server", "dtgpt.evaluation.harness",
]  # fmt: skip
COLLECT = 0.3  # seconds to wait for the failures of other ranks after the first that arrived
LINGER = 10  # seconds that a rank which returned keeps its group, for ranks that still talk to it


class RankFailed(AssertionError):
    """A rank raised, died or did not return in time. All ranks of the call are ended: the next call forks new ones."""


class Answer(NamedTuple):
    result: Any = None
    failure: str = ""
    when: float = 0.0  # of the failure, on the clock that processes share; a death has 0: it explains the others


class RankPool:
    """Rank i of every call is the same process as long as nothing fails."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._ranks: dict[int, Rank] = {}
        atexit.register(self.close)

    def run(self, world: int, function: Callable, *args: Any, timeout: float = 120) -> list:
        """What `function(*args)`, importable by name, returns on each rank of a new gloo group of `world` ranks."""
        __tracebackhide__ = True  # pytest shows the caller's line
        body = pickle.dumps((function, args))
        environment = {name: os.environ[name] for name in ["DTGPT_CACHE"] if name in os.environ}
        store = f"{self._folder.name}/store-{time.monotonic_ns()}"
        ranks = self._start(world)
        try:
            calls = [(body, index, world, store, timeout, environment) for index in range(world)]
            results = exchange(ranks, calls, timeout)
            exchange(ranks, ["leave"] * world, timeout)
            return results
        except BaseException:  # Ctrl-C too: a rank in the middle of a call is of no use to the next one
            self._discard(ranks)
            raise

    def close(self) -> None:
        self._discard(list(self._ranks.values()))
        self._folder.cleanup()

    def _start(self, world: int) -> list["Rank"]:
        for index in range(world):
            if index not in self._ranks or not self._ranks[index].process.is_alive():
                self._ranks[index] = Rank(index, self._context, Path(self._folder.name, f"rank-{index}.log"))
        return [self._ranks[index] for index in range(world)]

    def _discard(self, ranks: list["Rank"]) -> None:
        for rank in ranks:
            rank.end()
            del self._ranks[rank.index]


class Rank(Worker):
    """The parent's end of one process."""

    def __init__(self, index: int, context: Any, log: Path) -> None:
        super().__init__(context, serve, str(log))
        self.index, self.log = index, log

    def answer(self) -> Answer:
        try:
            return self.receive()
        except Died as died:
            return Answer(failure=str(died))

    def output(self) -> str:
        text = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return f"\n\noutput of rank {self.index}:\n{text[-6000:]}" if text else ""


def exchange(ranks: list[Rank], messages: list, timeout: float) -> list:
    """The answer of each rank to its message. The earliest failure is raised: it may have left other ranks blocked."""
    __tracebackhide__ = True
    for rank, message in zip(ranks, messages, strict=True):
        rank.send(message)
    waiting, answers = {rank.connection: rank for rank in ranks}, {}
    deadline = time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), max(0, deadline - time.monotonic()))):
        for rank in [waiting.pop(connection) for connection in ready]:
            answers[rank.index] = rank.answer()
            if answers[rank.index].failure:
                deadline = min(deadline, time.monotonic() + COLLECT)
    failures = [(answer.when, index, answer.failure) for index, answer in answers.items() if answer.failure]
    if failures:
        _, index, failure = min(failures)
        raise RankFailed(f"rank {index} of {len(ranks)} {failure}{ranks[index].output()}")
    if waiting:
        raise RankFailed(describe_hang(list(waiting.values()), timeout))
    return [answers[rank.index].result for rank in ranks]


def describe_hang(ranks: list[Rank], timeout: float) -> str:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGQUIT)  # see `serve`: prints the stacks
    time.sleep(0.5)
    outputs = "".join(rank.output() for rank in ranks)
    return f"ranks {[rank.index for rank in ranks]} did not return within {timeout:g} s{outputs}"


@functools.cache
def pool() -> RankPool:
    """The pool of this pytest worker."""
    return RankPool()


def serve(connection: Any, log: str) -> None:
    """The life of a rank process: one call after the other, each answered by its result and when its group is left."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)  # append: each call truncates
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # else a rank that dies takes its last lines with it
    faulthandler.enable(2)
    faulthandler.register(signal.SIGQUIT, 2)
    torch.set_num_threads(1)
    gc.freeze()  # the preloaded objects stay: collecting after each call takes milliseconds
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent ended
        while True:
            call = pickle.loads(connection.recv_bytes())
            os.ftruncate(output, 0)
            connection.send_bytes(attempt(run, *call))
            connection.send_bytes(attempt(leave, connection))


def attempt(function: Callable, *args: Any) -> bytes:
    try:
        return pickle.dumps(Answer(function(*args)))
    except BaseException:
        return pickle.dumps(Answer(failure=f"failed:\n{traceback.format_exc()}", when=time.monotonic()))


def run(body: bytes, rank: int, world: int, store: str, timeout: float, environment: dict[str, str]) -> Any:
    function, args = pickle.loads(body)  # here, so that a failing import is the rank's failure
    limit = timeout + 60  # the parent's is first, with the stacks of all ranks
    faulthandler.dump_traceback_later(limit, exit=True, file=2)  # ends a hung rank whose parent was killed
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    group = {"store": dist.FileStore(store, world), "timeout": timedelta(seconds=limit)}
    torch.manual_seed(0)  # the same numbers in every order of tests
    with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()} | environment):
        dist.init_process_group("gloo", rank=rank, world_size=world, **group)
        with no_pictures():
            return function(*args)


def leave(connection: Any) -> None:
    """Ends the group when every rank has returned: a slower one may still be making a subgroup with this one."""
    from dtgpt.util.torch_private import forget_meshes

    connection.poll(LINGER)  # not for ever: who waits for this rank in a collective then fails, with a traceback
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    torch.compiler.reset()
    gc.collect()
    connection.recv_bytes()
    faulthandler.cancel_dump_traceback_later()
