"""The connection to the next process: when its end says for certain that this process has ended, and the wait for the
verdict that says so."""

import json
import select
import socket
import threading
import time
from types import SimpleNamespace

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
    """Return a function that starts, on rank 0, the thread that follows rank 1, and waits until it has connected to the
    socket of rank 1. What it returns says whether that thread notices within some seconds that rank 1 has ended."""
    monkeypatch.setattr(module, "AGAIN", SOON)
    monkeypatch.setattr(module, "own_address", lambda: HERE)

    def begin(server: socket.socket):
        watch = watch_of_rank_0(*server.getsockname())
        threading.Thread(target=watch._follow, daemon=True).start()
        watches.append(watch)
        assert select.select([server], [], [], 60)[0]

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


def watch_of_rank_0(address: str, port: int) -> Watch:
    store = HashStore()
    store.set("place/1", json.dumps({"host": "there", "address": address, "port": port}))
    return Watch(Process(rank=0, world=2), Rendezvous("a start", store), 20)


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that accepts nothing; closed, it closes all connections, as the kernel does for a process. A
    second one of the same port gets connections once the first is closed."""
    return socket.create_server((address, port), backlog=16, reuse_port=True)


@pytest.mark.parametrize("address", [HERE, ELSEWHERE])
def test_a_process_whose_port_nobody_has_has_ended(follow, address):
    with listen(address) as server:
        noticed = follow(server)
        assert not noticed(6 * SOON)
    assert noticed(60)


@pytest.mark.parametrize(("address", "ended"), [(HERE, True), (ELSEWHERE, False)])
def test_another_process_may_have_the_port_of_one_that_has_ended_on_this_machine(follow, address, ended):
    """Elsewhere a closed connection may be the network's fault."""
    server = listen(address)
    noticed = follow(server)
    with listen(*server.getsockname()) as other:
        server.close()
        assert noticed(60 if ended else 6 * SOON) == ended
        assert ended or select.select([other], [], [], 60)[0]


@pytest.mark.parametrize(("address", "ended"), [(HERE, True), (ELSEWHERE, False)])
def test_some_kernels_close_a_connection_without_a_reset(follow, address, ended):
    with listen(address) as server:
        noticed = follow(server)
        server.accept()[0].close()
        assert noticed(60 if ended else 6 * SOON) == ended


@pytest.mark.parametrize(("address", "ended"), [(HERE, True), (ELSEWHERE, False)])
def test_a_connection_may_be_reset_as_soon_as_it_is_made(monkeypatch, address, ended):
    watch = watch_of_rank_0(address, 1)

    def reset(*_, **__):
        watch._stopped.set()
        raise ConnectionResetError

    monkeypatch.setattr(module, "own_address", lambda: HERE)
    monkeypatch.setattr(module, "socket", SimpleNamespace(create_connection=reset))
    watch._follow()
    assert watch._closed == ended


def test_a_process_that_says_it_has_ended_just_before_its_connection_closes_is_not_accused(monkeypatch):
    """The last heartbeat that was read is older than the end of the connection."""
    watch, actions = watch_of_rank_0(HERE, 1), []

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
    watch, slept = watch_of_rank_0(HERE, 1), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        watch._looks += 1

    clock = iter(range(0, 10**6, 1000))  # suspended for 1,000 s at each look
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    watch.await_verdict(5.0)
    assert sum(slept) == pytest.approx(5.0, abs=peers.BEAT / 10)
