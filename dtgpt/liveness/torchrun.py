"""The processes that torchrun started, with the watch over them, as the core wants them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist

from dtgpt.liveness import watch
from dtgpt.liveness.interfaces import cannot_connect, check_interfaces
from dtgpt.liveness.lost_peers import lost_peers_as_user_errors
from dtgpt.liveness.rendezvous import meet, not_found, patience
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Peers, Process
from dtgpt.util.shared.torch_private import post, posted

FAILURE = "failure"  # the name under which the rank that fails first leaves its reason


class Torchrun(Peers):
    def check(self, device_type: str) -> None:
        check_interfaces(device_type)

    def patience(self, seconds: float) -> float:
        return patience(seconds)

    def meet(self, process: Process, seconds: float) -> dist.Store:
        return meet(process, seconds).store

    def explained(self, error: Exception, seconds: float) -> Exception:
        if isinstance(error, ValueError | dist.DistError):
            return not_found(str(error).splitlines()[0])
        if "wait timeout" in str(error).lower():
            return not_found(f"not all of them came within {patience(seconds):g} s")
        return (isinstance(error, RuntimeError) and cannot_connect(error)) or error

    @contextmanager
    def watch(
        self, process: Process, seconds: float, lost_after: float, plan: str = "", chosen: bool = False
    ) -> Iterator[watch.Watch]:
        with watch.watch_peers(process, seconds, lost_after) as watching:
            theirs = watching.of_rank_0("plan", plan)
            if chosen and theirs != plan:
                raise UserError(
                    f"rank {process.rank} differs from rank 0 in the plan: {plan} there, {theirs} on rank 0; start "
                    "every rank with the same command on the same code"
                )
            yield watching

    def wait_if_left_over(
        self, process: Process, active: int, stop: Any, seconds: float, lost_after: float, plan: str, chosen: bool
    ) -> int | None:
        """Such a process has no memory of a GPU. It ends like the others where one is lost."""
        if process.rank < active:
            return None
        with self.watch(process, seconds, lost_after, plan, chosen) as watching, stop:
            watching.remedy = lambda: "go on with --resume if the run has a checkpoint, else start it again"
            return watching.wait_for_end(lambda: stop.requested)

    def losses_as_user_errors(self, seconds: float, remedy: Callable[[], str]) -> AbstractContextManager[None]:
        return lost_peers_as_user_errors(seconds, remedy)

    @contextmanager
    def failures_shared(self, rank: int, seconds: float, close: Callable[[], None]) -> Iterator[None]:
        def remedy() -> str:
            reason = posted(FAILURE)
            return f"start all of them again{f' ({reason})' if reason else ''}"

        try:
            with self.losses_as_user_errors(seconds, remedy):
                yield
        except BaseException as error:
            if posted(FAILURE) is None:
                post(FAILURE, f"rank {rank}: {error or repr(error)}")
            close()
            raise
