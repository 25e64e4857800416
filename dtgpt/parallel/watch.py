"""The watch over the processes of a run: when one of them is lost, the others end, and say which.

Each process writes a heartbeat into the store of the run and reads that of the next rank, in a thread of its own, so
that it does not matter what the step waits for: the device, a collective, or data. A TCP connection to the next rank
tells at once that its process has ended. Who notices a loss writes a verdict into the store, which all read. So the
cost of a process does not grow with their number. Clocks of different hosts are never compared.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist

from dtgpt.parallel.link import Link
from dtgpt.parallel.meeting import Meeting, is_refused, is_torchruns, meet
from dtgpt.parallel.process import Process
from dtgpt.util.console import close_streams, say_error

BEAT = 2.0  # seconds between two heartbeats
LOST_AFTER = 20.0  # seconds without a heartbeat after which a process counts as lost
LEAVE = 5.0  # seconds that a verdict takes at most, and that rank 0 keeps a store of its own for the others
ENDED = "ended"  # in place of a heartbeat
TICK = 1.0  # seconds between two looks at whether the store answers
VERDICT = 5.0  # seconds until the verdict about a process whose connections have just closed is known everywhere
CODE = 2  # exit code of a process whose peer is lost, as after a user's mistake


class Peer(NamedTuple):
    """What a process tells about itself when all meet."""

    host: str
    address: str
    port: int  # 0: it cannot be connected to
    nonce: str


class Watch:
    """The watch of this process over the others of the run, from `watch_peers`.

    meeting: the store of the run.
    step: the last step that this process has finished; the training loop sets it.
    remedy: what a user should do after a loss; the training loop sets it.
    on_stop: called once on rank 0 with the number of a signal that a waiting process got; the training loop sets it.
    """

    def __init__(self, process: Process, meeting: Meeting, link: Link | None, lost_after: float):
        self.process, self.meeting, self.step = process, meeting, 0
        self.host = socket.gethostname()
        self.remedy: Callable[[], str] = lambda: "start the run again"
        self.on_stop: Callable[[int], None] = lambda number: os.kill(os.getpid(), number)
        self._link, self._lost_after = link, lost_after
        self._next = (process.rank + 1) % process.world
        self._peer = Peer(**json.loads(meeting.store.get(f"place/{self._next}")))
        self._leaving = False  # this process ends by itself
        self._stopped = threading.Event()
        self._news = threading.Event()  # wakes the heartbeat
        self._gone = self._ending = False  # the next process; this one, by a verdict
        self._alone = 0.0  # seconds since the store answered
        self._threads = [
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True)
            for work in (self._heartbeat, self._guard)
        ]

    def fail(self, reason: str) -> None:
        """Tell the other processes that this one ends with an error. They end too, with this reason."""
        if not self._leaving:
            self._leaving = True
            _within_leave(lambda: self._accuse(self.meeting.store, self.process.rank, self.host, f"ended: {reason}"))

    def await_verdict(self, seconds: float = VERDICT) -> None:
        """Wait for the end of this process by a verdict about another one, where a collective has failed because of
        it; return if there is none."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._news.set()
            time.sleep(BEAT / 10)

    def end_run(self, code: int) -> None:
        """Tell the processes that wait for the end of the run, on rank 0, that it has come, with this exit code."""
        self.meeting.store.set("end", str(code))

    def wait_for_end(self, requested: Callable[[], int | None]) -> int:
        """Wait until rank 0 has called `end_run`, and return the exit code of the run. The first signal number that
        `requested()` returns is passed on to rank 0, which ends the run as if it had got that signal."""
        passed_on = False
        while True:
            with suppress(RuntimeError):  # the store is lost, which ends this process soon
                if self.meeting.store.check(["end"]):
                    return int(self.meeting.store.get("end"))
                if not passed_on and (number := requested()):
                    self.meeting.store.set("stop", str(number))
                    passed_on = True
            time.sleep(BEAT / 4)

    def begin(self) -> None:
        with suppress(RuntimeError):  # there can be no more threads: collectives alone notice a loss
            for thread in self._threads:
                thread.start()

    def finish(self) -> None:
        """End the watch of this process, which may end now without being missed."""
        self._leaving = True
        self._stopped.set()
        self._news.set()
        if self._link:
            self._link.wake()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(LEAVE)
        _within_leave(self._say_ended)
        if self._link:
            self._link.close()

    def _say_ended(self) -> None:
        """Leave word that this process may end. Rank 0, where it has the store, keeps it until all have done so."""
        store = self.meeting.store
        store.set(f"beat/{self.process.rank}", ENDED)
        store.add("ended", 1)
        while self.process.rank == 0 and not is_torchruns() and store.add("ended", 0) < self.process.world:
            time.sleep(0.01)

    def _heartbeat(self) -> None:
        """Run the thread that talks to the store, which may block it where the network is gone."""
        store, count, heard, silent, last = None, 0, b"", 0.0, time.monotonic()
        keys, stopping = ["verdict", f"beat/{self._next}", "stop"], False
        while not self._stopped.is_set():
            now = time.monotonic()
            passed, last = min(now - last, 2 * BEAT), now  # a process that was suspended accuses nobody of it
            count += 1
            try:
                store = store or self.meeting.connect(self._lost_after)
                store.set(f"beat/{self.process.rank}", f"{count} {self.step}")
                verdict, beat, stop = store.multi_get(keys)
                self._alone = 0.0
                if stop and not stopping and self.process.rank == 0:
                    stopping = True
                    self.on_stop(int(stop))
                if verdict:
                    self._end(**json.loads(verdict))
                silent, heard = silent + passed if beat == heard else 0.0, beat
                if not self._leaving and (self._gone or silent >= self._lost_after):
                    self._judge(store, beat.decode())
            except (RuntimeError, ValueError):  # the connection is lost: try another one
                store = None
                if not is_torchruns() and is_refused():  # rank 1 says so: its node's first rank may be the lost one
                    self._end(f"rank 0 (last step {self.step}) is lost: its process has ended", by=1)
            self._news.wait(BEAT)
            self._news.clear()

    def _judge(self, store: dist.Store, beat: str) -> None:
        """Say that the next process is lost, unless its last heartbeat says that it has ended its part."""
        if beat == ENDED:
            self._gone = False
            return
        why = "its process has ended" if self._gone else f"no sign of life for {self._lost_after:g} s"
        self._accuse(store, self._next, self._peer.host, f"is lost: {why}", beat.partition(" ")[2])
        self._news.set()  # read at once what the verdict is

    def _accuse(self, store: dist.Store, rank: int, host: str, what: str, step: str = "") -> None:
        """Write a verdict, unless there is one: the first says what happened."""
        text = f"rank {rank} on {host} (last step {step or self.step}) {what}"
        store.compare_set("verdict", "", json.dumps({"text": text, "by": self.process.rank}))

    def _guard(self) -> None:
        """Run the thread that never waits for the network: it follows the next process, and ends this one where the
        store does not answer."""
        if self._link and self._peer.port:
            self._link.follow(*self._peer[1:])
        last, ending = time.monotonic(), 0.0
        while not self._stopped.is_set():
            if self._link is None:
                self._stopped.wait(TICK)
            elif self._link.turn(TICK):
                self._gone = True
                self._news.set()
                self._stopped.wait(TICK)
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK), now
            self._alone += passed
            ending += passed * self._ending
            if ending >= LEAVE:
                os._exit(CODE)
            if self._alone >= self._lost_after + BEAT:
                place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                me = f"rank {self.process.rank} on {self.host} (last step {self.step})"
                what = f"has not reached the store of the run at {place} for {self._lost_after:g} s"
                self._end(f"{me} {what}: its node, or the network, is lost", self.process.rank)

    def _end(self, text: str, by: int) -> None:
        """End this process because of a verdict, found by the rank `by`, unless it is ending by itself."""
        if self._leaving or self._ending:
            return
        self._ending = True
        if self.process.local_rank == 0 or by == self.process.rank:
            say_error(f"dtgpt: {text}; {self.remedy()}")
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


def own_place(link: Link | None) -> Peer:
    return Peer(socket.gethostname(), *(link.place if link else ("", 0, "")))


@contextmanager
def watch_peers(process: Process, timeout: float, lost_after: float = LOST_AFTER) -> Iterator[Watch]:
    """Meet the other processes of this start within `timeout` seconds, then watch over them until the context ends. An
    exception that leaves the context is told to the others. Raises UserError where they do not meet."""
    try:
        link = Link()
    except OSError:  # heartbeats suffice, with more time
        link = None
    values = {f"place/{process.rank}": json.dumps(own_place(link)._asdict()), f"beat/{process.rank}": "0 0"}
    values |= {"verdict": "", "stop": ""} if process.rank == 0 else {}
    watch = Watch(process, meet(process, timeout, values), link, lost_after)
    watch.begin()
    try:
        yield watch
    except BaseException as error:
        watch.fail(str(error).partition("\n")[0] or type(error).__name__)
        raise
    finally:
        watch.finish()
