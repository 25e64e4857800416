"""The watch over the processes of a run: when one of them is lost, the others end, and name it.

Each process writes a heartbeat into the store of the run and reads that of the next rank, in a thread of its own, so
that it does not matter what the step waits for: the device, a collective, or data. A TCP connection to the next rank,
over which nothing is sent, is closed by the kernel as soon as that process ends. A process that notices a loss writes a
verdict into the store, which all read. So the cost of a process does not grow with their number. Clocks of different
hosts are never compared. `peers.py` decides; this file has the threads and sockets.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from dtgpt.liveness import peers
from dtgpt.liveness.interfaces import own_address
from dtgpt.liveness.lost_peers import is_late, is_loss
from dtgpt.liveness.peers import ENDED, Accuse, End, Peers
from dtgpt.liveness.rendezvous import Rendezvous, is_refused, is_torchruns, meet
from dtgpt.util import peers as peers_of_run
from dtgpt.util.console import close_streams, say_error
from dtgpt.util.peers import Process

LOST_AFTER = 20.0  # seconds without a heartbeat after which a process counts as lost
LEAVE = 5.0  # seconds that a verdict takes at most, and that rank 0 keeps a store of its own for the others
VERDICT = 5.0  # seconds until the verdict about a process whose connections have just closed is known everywhere
LOOKS = 3  # at the store until there is no verdict: one was on its way, one accuses, one reads
CONNECT = 2.0  # seconds for a connection to be made
AGAIN = 1.0  # seconds until a connection that could not be made is tried again: well within a wait for a verdict
CODE = 2  # exit code of a process whose peer is lost, as after a user's mistake


class Endpoint(NamedTuple):
    """Where the other processes find one."""

    host: str
    address: str
    port: int  # 0: it cannot be connected to


class Watch(peers_of_run.Watch):
    """The watch of this process over the others of the run, from `watch_peers`. rendezvous: the store of the run."""

    def __init__(self, process: Process, rendezvous: Rendezvous, lost_after: float):
        super().__init__()
        self.process, self.rendezvous, self.store = process, rendezvous, rendezvous.store
        self._lost_after = lost_after
        next_rank = (process.rank + 1) % process.world
        self._next = Endpoint(**json.loads(rendezvous.store.get(f"place/{next_rank}")))
        self._keys = ["verdict", f"beat/{next_rank}", "stop"]
        self._peers = Peers(
            rank=process.rank,
            host=socket.gethostname(),
            next_rank=next_rank,
            next_host=self._next.host,
            lost_after=lost_after,
            now=time.monotonic(),
        )
        self._closed = False  # the connection to the next process, for certain because it has ended
        self._looks = 0  # of the heartbeat at what the store says, each acted upon
        self._leaving = False  # this process ends by itself
        self._ending_since: float | None = None  # by a verdict
        self._stopped = threading.Event()
        self._news = threading.Event()  # wakes the heartbeat
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._heartbeat, self._guard)]
        # Not among those that `finish` waits for: it hangs in the kernel until the other end is closed.
        self._follower = threading.Thread(target=self._follow, daemon=True)

    def of_rank_0(self, name: str, value: str) -> str:
        """Return the value that rank 0 has under this name."""
        if self.process.rank == 0:
            self.rendezvous.store.set(name, value)
        return self.rendezvous.store.get(name).decode()

    def tell(self, error: BaseException) -> None:
        """Where the reason is the loss of another process, wait for the verdict that names it, which ends this one."""
        if is_loss(error) and not is_late(error):
            self.await_verdict()
        self.fail(str(error).partition("\n")[0] or type(error).__name__)

    def fail(self, reason: str) -> None:
        """Tell the other processes that this one ends with an error. They end too, with this reason."""
        if not self._leaving:
            self._leaving = True
            accusation = self._peers.fail(reason, self.step)
            _within_leave(lambda: accusation.write(self.rendezvous.store))

    def await_verdict(self, seconds: float = VERDICT) -> None:
        """Wait for the end of this process by a verdict about another one, where a collective has failed because of
        it; return if there is none. On a slow machine `seconds` may pass before the heartbeat has looked once: it gets
        the time in which it would notice that the store is lost."""
        turn, waited, looks = peers.BEAT / 10, 0.0, self._looks + LOOKS
        while waited < (seconds if self._looks >= looks else seconds + self._lost_after):
            self._news.set()
            time.sleep(turn)
            waited += turn  # not by the clock: seconds in which this process was suspended brought no news

    def end_run(self, code: int) -> None:
        if self.process.rank == 0:
            self.rendezvous.store.set("end", str(code))

    def wait_for_end(self, requested: Callable[[], int | None]) -> int:
        """Wait until rank 0 has called `end_run`, and return the exit code of the run. The first signal number that
        `requested()` returns is passed on to rank 0."""
        passed_on = False
        while True:
            with suppress(RuntimeError):  # the store is lost, which ends this process soon
                if self.rendezvous.store.check(["end"]):
                    return int(self.rendezvous.store.get("end"))
                if not passed_on and (number := requested()):
                    self.rendezvous.store.set("stop", str(number))
                    passed_on = True
            time.sleep(peers.BEAT / 4)

    def begin(self) -> None:
        with suppress(RuntimeError):  # there can be no more threads: collectives alone notice a loss
            for thread in (*self._threads, self._follower):
                thread.start()

    def finish(self) -> None:
        """End the watch of this process, which may end now without being missed."""
        self._leaving = True
        self._stopped.set()
        self._news.set()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(LEAVE)
        _within_leave(self._say_ended)

    def _say_ended(self) -> None:
        """Leave word that this process may end. Rank 0, where it has the store, keeps it until all have done so."""
        store = self.rendezvous.store
        store.set(f"beat/{self.process.rank}", ENDED)
        store.add("ended", 1)
        while self.process.rank == 0 and not is_torchruns() and store.add("ended", 0) < self.process.world:
            time.sleep(0.01)

    def _heartbeat(self) -> None:
        """Run the thread that talks to the store, which may block it where the network is gone."""
        store, stopping = None, False
        while not self._stopped.is_set():
            own = self._peers.own_beat(self.step)
            # Before the store is asked: a process that has done its part says so there, then closes the connection.
            self._peers.gone = self._closed
            try:
                store = store or self.rendezvous.connect(self._lost_after)
                store.set(f"beat/{self.process.rank}", own)
                verdict, beat, stop = (value.decode() for value in store.multi_get(self._keys))
                if stop and not stopping and self.process.rank == 0:
                    stopping = True
                    self.on_stop(int(stop))
                action = self._peers.hear(time.monotonic(), beat, verdict)
                if isinstance(action, Accuse) and not self._leaving:
                    action.write(store)
                    self._news.set()  # read at once what the verdict is
            except (RuntimeError, ValueError):  # the connection is lost: try another one
                store = None
                action = self._peers.hear_nothing(time.monotonic(), not is_torchruns() and is_refused())
            if isinstance(action, End):
                self._end(action)
            self._looks += 1
            self._news.wait(peers.BEAT)
            self._news.clear()

    def _guard(self) -> None:
        """Run the thread that never waits for the network: it ends this process where the store does not answer, or
        where the end that a verdict asks for takes too long."""
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        while not self._stopped.wait(peers.TICK):
            now = time.monotonic()
            if self._ending_since is not None and now >= self._ending_since + LEAVE:
                os._exit(CODE)
            if action := self._peers.wait(now, place):
                self._end(action)

    def _follow(self) -> None:
        """Run the thread that holds a connection to the next process and notices that it is closed.

        That process has ended for certain where nobody has its port any more: on this machine, or on another one that
        could be reached before. On this machine a closed connection suffices, since the kernel alone closes it, and the
        port may be another process's by then. What else goes wrong may be the network's fault: heartbeats decide."""
        place = self._next.address, self._next.port
        here = self._next.address == own_address()
        reached = here
        while self._next.port and not self._stopped.is_set():
            closed = False
            try:
                # A reset may come as soon as the connection is made; some kernels close it without one.
                with suppress(ConnectionResetError), socket.create_connection(place, timeout=CONNECT) as connection:
                    reached = True
                    connection.settimeout(None)
                    connection.recv(1)
                reached, closed = True, here
            except ConnectionRefusedError:
                closed = reached
            except OSError:
                pass
            if closed:
                self._closed = True
                self._news.set()
            self._stopped.wait(AGAIN)

    def _end(self, action: End) -> None:
        """End this process because of a verdict, unless it is ending by itself."""
        if self._leaving or self._ending_since is not None:
            return
        self._ending_since = time.monotonic()
        if self.process.local_rank == 0 or action.by == self.process.rank:
            say_error(f"dtgpt: {action.text}; {self.remedy()}")
        close_streams()
        os._exit(CODE)


def _within_leave(work: Callable[[], None]) -> None:
    """Run `work`, which asks the store, and go on after LEAVE seconds where the store does not answer."""

    def ask() -> None:
        with suppress(RuntimeError):  # the store is gone
            work()

    thread = threading.Thread(target=ask, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there can be no more threads
        return ask()
    thread.join(LEAVE)


def open_port() -> socket.socket | None:
    """Return a socket to which the process of the rank before connects: the kernel holds that connection, which nobody
    accepts, until this process ends. None where the system gives no socket: heartbeats suffice, with more time."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with suppress(OSError):
        return socket.create_server(("", 0), family=family, backlog=16, dualstack_ipv6=dual)
    return None


@contextmanager
def watch_peers(process: Process, timeout: float, lost_after: float = LOST_AFTER) -> Iterator[Watch]:
    """Meet the other processes of this start within `timeout` seconds, then watch over them until the context ends. An
    exception that leaves the context is told to the others. Raises UserError where they do not meet."""
    port = open_port()
    place = {"host": socket.gethostname(), "address": own_address(), "port": port.getsockname()[1] if port else 0}
    values = {f"place/{process.rank}": json.dumps(place), f"beat/{process.rank}": "0 0"}
    values |= {"verdict": "", "stop": ""} if process.rank == 0 else {}
    watch = Watch(process, meet(process, timeout, values), lost_after)
    watch.begin()
    try:
        yield watch
    except BaseException as error:
        watch.fail(str(error).partition("\n")[0] or type(error).__name__)
        raise
    finally:
        watch.finish()
        if port:
            port.close()
