"""The processes of a run, as one of them sees the others: how they find each other, and what happens when one is lost.

By themselves, processes meet in torch's store, and notice a loss where a collective fails. The capability `liveness`
gives both classes here more to do.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from dtgpt.util import seams
from dtgpt.util.process import Process


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

    def of_rank_0(self, name: str, value: str) -> str:
        """Return the value that rank 0 has under this name."""
        return value

    def tell(self, error: BaseException) -> None:
        """Tell the other processes why this one ends."""

    def end_run(self, code: int) -> None:
        """Tell the processes that wait for the end of the run, on rank 0, that it has come, with this exit code."""

    def wait_for_end(self, requested: Callable[[], int | None]) -> int:
        """Wait until rank 0 has called `end_run`, and return the exit code of the run. The first signal number that
        `requested()` returns is passed on to rank 0."""
        return 0


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

    def watch(self, process: Process, seconds: float, lost_after: float) -> AbstractContextManager[Watch]:
        """Meet the other processes within `seconds`, then watch over them until the context ends. lost_after: seconds
        without a sign of life after which a process counts as lost."""
        return nullcontext(Watch())

    def losses_as_user_errors(self, seconds: float, remedy: Callable[[], str]) -> AbstractContextManager[None]:
        """Turn errors that say that another process has ended, or did not answer within `seconds`, into a UserError
        with this remedy."""
        return nullcontext()


def peers(world: int) -> Peers:
    """Return how `world` processes find each other. One alone has nobody to find."""
    found = seams.listed("peers") if world > 1 else []
    return found[0]() if found else Peers()
