"""The connection to the next process: when its end says for certain that this process has ended, and the wait for the
verdict that says so."""

import json
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from dtgpt.liveness import peers
from dtgpt.liveness import watch as module
from dtgpt.liveness.rendezvous import Rendezvous
from dtgpt.liveness.watch import Watch
from dtgpt.util.peers import Process

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
SOON = 0.05  # seconds until a connection is tried again


@pytest.fixture
def follow(monkeypatch):
    """Return a function that starts, on rank 0, the thread that follows rank 1 at a place; its return value is whether
    that thread notices within some seconds that rank 1 has ended."""
    monkeypatch.setattr(module, "AGAIN", SOON)
    monkeypatch.setattr(module, "own_address", lambda: HERE)

    def begin(address: str, port: int):
        watch = Watch(Process(rank=0, world=2), Rendezvous("a start", store_of(address, port)), 20)
        threading.Thread(target=watch._follow, daemon=True).start()
        watches.append(watch)

        def noticed(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not watch._closed and time.monotonic() < end:
                time.sleep(SOON / 5)
            return watch._closed

        return noticed

    watches: list[Watch] = []
    yield begin
    for watch in watches:
        watch._stopped.set()


def store_of(address: str, port: int) -> HashStore:
    store = HashStore()
    store.set("place/1", json.dumps({"host": "there", "address": address, "port": port}))
    for key, value in {"verdict": "", "beat/1": "3 7", "stop": ""}.items():
        store.set(key, value)
    return store


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that accepts nothing; closed, it closes all connections, as the kernel does for a process."""
    return socket.create_server((address, port), backlog=16)


@pytest.mark.parametrize("address", [HERE, ELSEWHERE])
def test_a_process_whose_port_nobody_has_has_ended(follow, address):
    with listen(address) as server:
        noticed = follow(*server.getsockname())
        assert not noticed(6 * SOON)
    assert noticed(10)


@pytest.mark.parametrize(("address", "ended"), [(HERE, True), (ELSEWHERE, False)])
def test_another_process_may_have_the_port_of_one_that_has_ended_on_this_machine(follow, address, ended):
    """Elsewhere a closed connection may be the network's fault."""
    with listen(address) as server:
        noticed = follow(*server.getsockname())
        assert not noticed(6 * SOON)
        place = server.getsockname()
    with listen(*place):
        assert noticed(10 if ended else 6 * SOON) == ended


def test_a_process_that_says_it_has_ended_just_before_its_connection_closes_is_not_accused(follow, monkeypatch):
    """The last heartbeat that was read is older than the end of the connection."""
    with listen(HERE) as server:
        store = store_of(*server.getsockname())
        watch = Watch(Process(rank=0, world=2), Rendezvous("a start", store), 20)
    actions = []

    class Store:
        def set(self, key, value):
            pass

        def multi_get(self, keys):
            watch._closed = True  # of a process that said so after this answer was made
            return [b"", b"3 7", b""] if not actions else [b"", b"ended", b""]

        def compare_set(self, *_):
            actions.append("accused")

    hear = watch._peers.hear

    def heard(*words):
        actions.append(hear(*words))
        if len(actions) == 3:
            watch._stopped.set()
        watch._news.set()
        return actions[-1]

    monkeypatch.setattr(watch._peers, "hear", heard)
    monkeypatch.setattr(Rendezvous, "connect", lambda *_: Store())
    watch._heartbeat()
    assert actions == [None, None, None]


def test_seconds_in_which_this_process_was_suspended_are_none_of_those_that_it_waits_for_a_verdict(monkeypatch):
    watch = Watch(Process(rank=0, world=2), Rendezvous("a start", store_of(HERE, 1)), 20)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        watch._looks += 1

    clock = iter(range(0, 10**6, 1000))  # suspended for 1,000 s at each look
    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    watch.await_verdict(5.0)
    assert sum(slept) == pytest.approx(5.0, abs=peers.BEAT / 10)
