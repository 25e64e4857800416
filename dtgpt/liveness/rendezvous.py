"""The meeting of the processes that torchrun started, in a store that holds nothing of an earlier start.

torchrun restarts processes with the store of the start before, in which the ranks would find addresses of processes
that have ended. So each start has a name of its own, which rank 0 chooses and hands to every rank that greets it.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist

from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process
from dtgpt.util.shared.stderr import stderr_dropped

ALONE = 45.0  # seconds of a meeting that torchrun does not oversee: nobody ends those who wait for one that has died
POLL = 0.05  # seconds between two looks of rank 0 at who has come
AGAIN = 1.0  # seconds that a process which has lost its connection waits for the process that has the store
CONNECT = 5.0  # seconds that torch then tries to connect to that process, which may be ending
STAYS = 0.05  # seconds after which a new connection counts as kept
MOST_NAMED = 8  # ranks in a message


def open_store(seconds: float, patience: float | None = None) -> dist.Store:
    """Return a new connection to the store at `MASTER_ADDR` and `MASTER_PORT`: torchrun's, or one that rank 0 opens.
    `seconds`: the longest wait for it, and for any key later; `patience`: seconds to wait for the process that has it,
    where these are fewer. Raises torch's DistError and ValueError."""
    joins = is_torchruns() or os.environ.get("RANK") != "0"
    if joins:
        with suppress(KeyError, ValueError):  # no place, which torch says
            _await_store(patience or seconds)
    # Where the store is gone again, torch prints C++ frames before it raises. Later, other threads may write to stderr.
    with stderr_dropped() if joins and patience is None else nullcontext():
        waits = timedelta(seconds=seconds if patience is None else min(seconds, CONNECT))
        store = next(dist.rendezvous("env://", timeout=waits))[0]
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _await_store(seconds: float) -> None:
    """Wait until the store can be connected to. Raise DistNetworkError after `seconds`: torch would print pages of C++
    frames before it does the same."""
    end = time.monotonic() + seconds
    while True:
        try:
            return _reach(max(POLL, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() >= end:
                raise dist.DistNetworkError(f"timed out after {seconds:g} s: {error}") from None
        time.sleep(POLL)


def _reach(timeout: float) -> None:
    """Connect to the process that has the store. Raises ConnectionRefusedError where there is none, or where the kernel
    closes the connection at once, since that process is ending; another OSError where the network does not work."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(place, timeout=timeout) as connection:
        connection.settimeout(STAYS)
        try:
            connection.recv(1)
        except TimeoutError:
            return
        except ConnectionResetError:
            pass
    raise ConnectionRefusedError("the connection was closed")


def is_torchruns() -> bool:
    """Return whether the store is that of torchrun's process, and not of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_refused() -> bool:
    """Return whether the process that had the store has ended for certain: its host is there, but nobody answers."""
    try:
        _reach(2)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


class Rendezvous(NamedTuple):
    """What the processes of one start share."""

    name: str
    store: dist.Store  # with keys of this start alone

    def connect(self, seconds: float) -> dist.Store:
        """Return the same keys by a connection of its own, for another thread; `seconds`, raises: as `open_store`."""
        return dist.PrefixStore(f"dtgpt/{self.name}", open_store(seconds, AGAIN))


def patience(seconds: float) -> float:
    """Return for how long processes wait for each other before they have met, of the `seconds` that they may."""
    return seconds if is_torchruns() else min(seconds, ALONE)


def meet(process: Process, seconds: float, values: Mapping[str, str] = MappingProxyType({})) -> Rendezvous:
    """Wait until all processes of this start have come, each of which leaves its `values` in the store before anyone
    goes on. Raises UserError after `seconds`, without torchrun after ALONE at most."""
    seconds = patience(seconds)
    end = time.monotonic() + seconds
    try:
        store = open_store(seconds)
        if process.rank == 0:
            return _welcome(store, process.world, end, values)
        nonce = secrets.token_hex(8)
        store.set(f"dtgpt/hello/{process.rank}", nonce)
        name = _wait(store, f"dtgpt/answer/{nonce}", end)
        own = dist.PrefixStore(f"dtgpt/{name}", store)
        _leave(own, {**values, f"came/{process.rank}": ""})
        own.add("here", 1)
        _wait(own, "begin", end)
        return Rendezvous(name, own)
    except (ValueError, dist.DistError) as error:
        text = str(error).splitlines()[0]
        late = "timeout" in text.lower() or "timed out" in text.lower()
        reason = f"not all of them came within {seconds:g} s" if late else text
        raise not_found(reason) from None


def _welcome(store: dist.Store, world: int, end: float, values: Mapping[str, str]) -> Rendezvous:
    """Answer, on rank 0, every process that greets, until all ranks have answered back: what greeted before may be of
    an earlier start, whose processes have ended."""
    name = secrets.token_hex(8)
    own = dist.PrefixStore(f"dtgpt/{name}", store)
    _leave(own, values)
    greetings = [f"dtgpt/hello/{rank}" for rank in range(1, world)]
    answered: set[bytes] = set()
    while own.add("here", 0) < world - 1:
        if time.monotonic() > end:
            missing = [str(rank) for rank in range(1, world) if not own.check([f"came/{rank}"])]
            ranks = ", ".join(missing[:MOST_NAMED]) + ", ..." * (len(missing) > MOST_NAMED)
            raise not_found(f"rank {ranks} of {world} did not come in time")
        for nonce in set(store.multi_get(greetings)) - answered if store.check(greetings) else ():
            store.set(f"dtgpt/answer/{nonce.decode()}", name)
            answered.add(nonce)
        time.sleep(POLL)
    own.set("begin", "")
    return Rendezvous(name, own)


def _leave(store: dist.Store, values: Mapping[str, str]) -> None:
    for key, value in values.items():
        store.set(key, value)


def _wait(store: dist.Store, key: str, end: float) -> str:
    store.wait([key], timedelta(seconds=max(0.001, end - time.monotonic())))
    return store.get(key).decode()


def not_found(reason: str) -> UserError:
    hint = ""
    if is_torchruns() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        hint = "; if torchrun restarted them, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return UserError(
        f"the processes did not find each other ({reason}); start all of them with torchrun, at the same time{hint}"
    )
