"""Tests of distributed code: processes that start once per pytest worker and run functions as the ranks of a group."""

import atexit
import faulthandler
import functools
import gc
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dtgpt.compare.fuzz.pool import IMPORTS, Pool, PoolJob, ProcessResult
from dtgpt.util.errors import UserError
from tests.support.pictures import no_pictures

# Imported once, so that a rank is a quick fork; none of them starts a thread.
PRELOADED = [
    *IMPORTS, "torch.distributed.run", "torch.distributed.tensor.experimental", "einops", "safetensors.torch",
    "tiktoken_ext.openai_public", "starlette.applications", "starlette.routing", "uvicorn", "matplotlib.pyplot",
    "dtgpt.cli", "dtgpt.train.loop", "dtgpt.serve.server", "dtgpt.evaluation.harness", "tests.support.kept_shapes",
    "tests.support.kept_weights", "pytest", "tests.support.imported",
]  # fmt: skip


class RankFailed(AssertionError):
    """A rank raised, died or did not return in time. All ranks of the call are ended: the next call forks new ones."""


class RankPool:
    """Rank i of every call is the same process as long as nothing fails."""

    def __init__(self) -> None:
        self._pool = Pool("cpu", PRELOADED)
        atexit.register(self._pool.close)

    def run(self, world: int, function: Callable, *args: Any, timeout: float = 400) -> list:
        """What `function(*args)`, importable by name, returns on each rank of a new gloo group of `world` ranks."""
        __tracebackhide__ = True  # pytest shows the caller's line
        environment = {name: os.environ[name] for name in ["DTGPT_CACHE"] if name in os.environ}
        (answers,) = self._pool.run(
            [PoolJob(world, call, (pickle.dumps((function, args)), environment, timeout))], timeout
        )
        failed = [answer for answer in answers if answer.failure]
        if failed:
            raise RankFailed(describe(failed, world))
        return [answer.value for answer in answers]


def describe(failed: list[ProcessResult], world: int) -> str:
    """What happened first, since it may have left other ranks blocked, or all ranks that hang."""
    first = min(failed, key=lambda answer: answer.when)
    ranks = [answer for answer in failed if answer.when == first.when]
    outputs = "".join(f"\n\noutput of rank {answer.rank}:\n{answer.output}" for answer in ranks)
    return f"ranks {[answer.rank for answer in ranks]} of {world}: {first.failure}{outputs}"


def call(body: bytes, environment: dict[str, str], timeout: float) -> Any:
    """On a rank. What was pickled is opened here, so that a failing import is the rank's failure."""
    faulthandler.dump_traceback_later(timeout + 60, exit=True, file=2)  # ends a hung rank whose parent was killed
    gc.freeze()  # what former calls have left, such as caches, is searched for garbage no more
    torch.manual_seed(0)  # the same numbers in every order of tests
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        function, args = pickle.loads(body)
        with mock.patch.dict(os.environ, environment), no_pictures():
            return function(*args)
    except UserError as error:  # no refusal of a case, but a failure with its traceback
        raise AssertionError(f"UserError: {error}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def each(function: Callable, cases: Sequence, *args: Any) -> list:
    """As the body of one call: what `function(case, *args)` returns of each case, one after the other in one group."""
    return several([(function, case, *args) for case in cases])


def several(calls: list[tuple]) -> list:
    """What each function returns on this rank, in turn: one group for several bodies, which takes a while to make."""
    return [function(*args) for function, *args in calls]


@functools.cache
def pool() -> RankPool:
    """The pool of this pytest worker."""
    return RankPool()
