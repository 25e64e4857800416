"""Who this process is among those that torchrun started, how it finds the others, and what happens when one is lost.

torchrun tells a process its place in environment variables, of which some may be missing or contradict the others:
torch would then wait for processes that do not exist, until a timeout. So `Process` checks them as it reads them. A
loop that asked at each place whether somebody watches would have a branch at each; `Watch` and `Peers` do nothing
instead.

By themselves, processes meet in torch's store, and notice a loss where a collective fails. The capability `liveness`
gives `Watch` and `Peers` more to do.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtgpt.util import seams
from dtgpt.util.errors import UserError

VARIABLES = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}


@dataclass(frozen=True)
class Process:
    """The environment variables that torchrun sets; a process alone where there are none."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on its node
    local_world: int = 1

    @classmethod
    def from_environment(cls) -> "Process":
        given = {field: os.environ.get(name, "") for field, name in VARIABLES.items()}
        numbers = {field: int(text) for field, text in given.items() if text.isdecimal()}
        process = cls(**numbers)
        missing = any(text or process.world > 1 for field, text in given.items() if field not in numbers)
        if missing or process.rank >= process.world or process.local_rank >= process.local_world:
            said = " ".join(f"{VARIABLES[field]}={text}" for field, text in given.items())
            raise UserError(
                f"the environment says {said}, which do not fit each other; start the processes with torchrun"
            )
        return process

    def among(self, active: int) -> "Process":
        """Return this process as one of the `active` lowest ranks, where the others take no part in the run. The ranks
        of a node follow each other."""
        return replace(self, world=active, local_world=min(self.local_world, active - (self.rank - self.local_rank)))


class Watch:
    """What this process tells the others of a run, and hears of them: here nothing.

    store: in which the processes have met; None: they have not.
    step: the last step that this process has finished; the training loop sets it.
    remedy: what a user should do after a loss; the training loop sets it.
    on_stop: called once on rank 0 with the number of a signal that a waiting process got; the training loop sets it.
    """

    store: dist.Store | None = None

    def __init__(self) -> None:
        self.step = 0
        self.remedy: Callable[[], str] = lambda: "start the run again"
        self.on_stop: Callable[[int], None] = lambda number: os.kill(os.getpid(), number)

    def tell(self, error: BaseException) -> None:
        """Tell the other processes why this one ends."""

    def end_run(self, code: int) -> None:
        """Tell the processes that wait for the end of the run that it has come, with this exit code."""


class Peers:
    """How processes find each other. torch has the rules."""

    def check(self, device_type: str) -> None:
        """Raise UserError where this machine lacks what the environment says of its network."""

    def patience(self, seconds: float) -> float:
        """Return for how long processes wait for each other before they have met, of the `seconds` that they may."""
        return seconds

    def meet(self, process: Process, seconds: float) -> dist.Store:
        """Wait until all processes of this start have come, and return a store with keys of this start."""
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]

    def explained(self, error: Exception, seconds: float) -> Exception:
        """Return what to raise in place of an error with which a process group did not begin within `seconds`."""
        return error

    def watch(
        self, process: Process, seconds: float, lost_after: float, plan: str = "", chosen: bool = False
    ) -> AbstractContextManager[Watch]:
        """Meet the other processes within `seconds`, then watch over them until the context ends. lost_after: seconds
        without a sign of life after which a process counts as lost. plan: of this process, which has `chosen` it among
        several. Raise UserError where rank 0 has chosen another."""
        return nullcontext(Watch())

    def wait_if_left_over(
        self, process: Process, active: int, stop: Any, seconds: float, lost_after: float, plan: str, chosen: bool
    ) -> int | None:
        """Wait for the end of the run where this process is not among its `active` ones, and return the exit code of
        the run; None: it is among them. stop: a `StopRequest`, which is passed on to
        rank 0. The others are those of `watch`."""
        return None

    def losses_as_user_errors(self, seconds: float, remedy: Callable[[], str]) -> AbstractContextManager[None]:
        """Turn errors that say that another process has ended, or did not answer within `seconds`, into a UserError
        with this remedy."""
        return nullcontext()

    def failures_shared(self, rank: int, seconds: float, close: Callable[[], None]) -> AbstractContextManager[None]:
        """Leave the reason with which this process fails in the context to the others, then `close` what they wait in;
        where another one failed first, or did not answer within `seconds`, raise a UserError with its reason."""
        return nullcontext()


def peers(world: int) -> Peers:
    """Return how `world` processes find each other. One alone has nobody to find."""
    found = seams.listed("peers") if world > 1 else []
    return found[0]() if found else Peers()
