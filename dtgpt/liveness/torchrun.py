"""The processes that torchrun started, with the watch over them, as the core wants them."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist

from dtgpt.liveness.interfaces import cannot_connect, check_interfaces
from dtgpt.liveness.lost_peers import lost_peers_as_user_errors
from dtgpt.liveness.rendezvous import meet, not_found, patience
from dtgpt.liveness.watch import watch_peers
from dtgpt.util.peers import Peers, Process, Watch


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

    def watch(self, process: Process, seconds: float, lost_after: float) -> AbstractContextManager[Watch]:
        return watch_peers(process, seconds, lost_after)

    def losses_as_user_errors(self, seconds: float, remedy: Callable[[], str]) -> AbstractContextManager[None]:
        return lost_peers_as_user_errors(seconds, remedy)
