# ruff: noqa: F401, F811  (fixtures are imported)
"""Connections: whoever sends whatever holds nobody up, and who ends a half of a connection gets the answer."""

import asyncio
import json
import logging
import random
import socket
import struct
import time
from contextlib import suppress

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtgpt.serve.connection import Turns
from tests.serve.test_hostile import (
    ENDLESS,
    POSTS,
    SMALL,
    address,
    connect,
    head,
    http,
    idle,
    nothing_is_left,
    received,
    service,
)
from tests.support.server import wait_until


def chunked(path="/v1/completions", content=b" " * 40_000, size=1, **headers):
    """A request whose body comes in chunks of `size` bytes."""
    pieces = [content[begin : begin + size] for begin in range(0, len(content), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head(path, POSTS[path], Transfer_Encoding="chunked", **headers) + b"\r\n\r\n" + body + b"0\r\n\r\n"


def test_chunks_of_a_byte_hold_nobody_up(address, monkeypatch):
    """The loop parses a little at a time, on the clock of its thread: a read of 256 KiB would take 0.4 s."""
    seconds, parse = [], H11Protocol.data_received

    def measured(connection, data):
        begin = time.thread_time()
        parse(connection, data)
        seconds.append(time.thread_time() - begin)

    monkeypatch.setattr(H11Protocol, "data_received", measured)
    with connect(address) as connection:
        with suppress(ConnectionError):
            connection.sendall(chunked(content=b" " * 500_000))
        assert received(connection)[:13] in (b"HTTP/1.1 413 ", b"HTTP/1.1 408 ")  # the time for a body is 0.4 s here
    assert max(seconds) < sum(seconds) / 3  # a read of 256 KiB is more than half of all; few are made while recorded


def test_a_body_of_few_chunks_is_read_whatever_their_size(address):
    body = json.dumps(SMALL).encode()
    for size in (1, 7, len(body)):
        for extension in (b"", b";a=b"):
            request = chunked(content=body, size=size, Connection="close")
            with connect(address) as connection:
                connection.sendall(request.replace(b"\n1\r\n", b"\n1" + extension + b"\r\n") if size == 1 else request)
                assert received(connection).startswith(b"HTTP/1.1 200"), (size, extension)


def test_what_surrounds_a_body_is_limited_too(address):
    with connect(address) as connection:
        with suppress(ConnectionError):
            for _ in range(100):  # 400 kB for 100 bytes
                connection.sendall(b"" if _ else head(Transfer_Encoding="chunked") + b"\r\n\r\n")
                connection.sendall(b"1;" + b"x" * 4000 + b"\r\n \r\n")
        answer = received(connection)
    assert b" 413 " in answer[:20] and b"chunks of the body are too small" in answer


@pytest.mark.parametrize("size", [1, 65536])
def test_a_body_that_nobody_reads_ends_the_connection(address, size):
    """A request that is refused for its head, such as one without the key, cannot send for ever."""
    piece = b"%x\r\n%s\r\n" % (size, b" " * size)
    with connect(address) as connection:
        connection.sendall(head(Transfer_Encoding="chunked").replace(b"127.0.0.1", b"evil.example") + b"\r\n\r\n")
        sent = 0
        with suppress(ConnectionError):
            for _ in range(2**28 // len(piece)):
                connection.sendall(piece * (1 if size > 1 else 1000))
                sent += len(piece) * (1 if size > 1 else 1000)
        assert sent < 2**26
        assert not sent or received(connection)[:20].startswith((b"HTTP/1.1 403", b""))


def test_turns_go_to_the_address_and_then_to_the_connection_with_the_least_time(monkeypatch):
    clock, order, planned = [0.0], [], []
    monkeypatch.setattr("dtgpt.serve.connection.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("dtgpt.serve.connection.time.thread_time", lambda: clock[0])

    class Loop:
        """An event loop that runs what was planned last, unless that was cancelled."""

        def call_soon(self, work, *arguments):
            return self.call_later(0.0, work, *arguments)

        def call_later(self, seconds, work, *arguments):
            planned.append((clock[0] + seconds, work, arguments))
            return self

        def cancel(self): ...

    class One:
        """A connection that has something to parse for as long as it likes, each time for so many seconds."""

        def __init__(self, name, address, cost, left):
            self.name, self.address, self.cost, self.left = name, address, cost, left
            self.spent = self.total = 0.0
            self.loop = Loop()

        def parse(self):
            clock[0] += self.cost * random.uniform(0.9, 1.1)
            self.left -= 1
            order.append((self.name, clock[0]))

        def go_on(self):
            if self.left:
                turns.join(self)

    turns = Turns()
    here, there = turns.address_of("here"), turns.address_of("there")
    for index in range(50):
        turns.join(One(f"heavy {index}", here, 0.004, 100))
    late = None
    while clock[0] < 5:
        when, work, arguments = planned[-1]
        clock[0] = max(clock[0], when)
        work(*arguments)
        if late is None and clock[0] > 1:
            late = clock[0]
            turns.join(One("light", there, 0.0001, 20))
            turns.join(One("neighbour", here, 0.0001, 1))
    ends = {name: when for name, when in order if not name.startswith("heavy")}
    assert ends["light"] < late + 0.01 and ends["neighbour"] < late + 0.05, (late, ends)
    heavy = sum(name.startswith("heavy") for name, _ in order)
    assert 0.2 < heavy * 0.004 / clock[0] < 0.35  # the rest of the time is the engine's


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/api"])
def test_a_client_that_ends_its_half_gets_its_answer(address, path, stream):
    small = {**SMALL, "stream": stream} if path != "/api" else {"prompts": ["Hello"], "tokens_to_generate": 3}
    body = json.dumps(small).encode()
    with connect(address) as connection:
        connection.sendall(head(path, POSTS[path], Content_Length=len(body)) + b"\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)  # to the end: the server closes its half, too
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert (b"[DONE]" in answer) == (stream and path != "/api")


def test_a_client_that_ends_its_half_gets_all_answers_and_errors(address):
    get, body = head("/health", "GET") + b"\r\n\r\n", json.dumps(SMALL).encode()
    post = head(Content_Length=len(body)) + b"\r\n\r\n" + body
    for sent, statuses in (
        (get + post + get, [200, 200, 200]), (head("/nothing", "GET") + b"\r\n\r\n", [404]),
        (chunked(content=body, size=3), [200]), (head(Content_Length=1) + b"\r\n\r\n{", [400]), (b"GET /hea", [400]),
        (post.replace(b"HTTP/1.1", b"HTTP/1.0"), [200]), (b"", []),
    ):  # fmt: skip
        with connect(address) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            lines = [line for line in received(connection).split(b"\r\n") if b"HTTP/1.1 " in line]
        assert [int(line.rpartition(b"HTTP/1.1 ")[2][:3]) for line in lines] == statuses, sent


def test_a_client_that_ends_its_half_and_then_leaves_frees_its_slots(address, service):
    body = json.dumps(ENDLESS).encode()
    with connect(address) as connection:
        connection.sendall(head(Content_Length=len(body)) + b"\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: not idle(service), 5)
        time.sleep(0.5)
        assert not idle(service)
    wait_until(lambda: idle(service), 2)


@pytest.fixture
def logged():
    """What is logged during a test: asyncio writes tracebacks there of what nobody has caught."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


REFUSED = head(Transfer_Encoding="chunked").replace(b"127.0.0.1", b"evil.example") + b"\r\n\r\n1\r\n \r\n"


@pytest.mark.parametrize("kind, method, error", [
    (asyncio.selector_events._SelectorSocketTransport, "write_eof", OSError(107, "the endpoint is not connected")),
    (H11Protocol, "handle_events", ZeroDivisionError("a fault of ours")),
])  # fmt: skip
def test_a_failure_of_one_connection_stops_nobody_else(address, http, monkeypatch, logged, capsys, kind, method, error):
    """A client that resets its connection amid its request makes `write_eof` raise, for example."""
    real = getattr(kind, method)

    def failing(own, *arguments):
        peer = own.client if kind is H11Protocol else own.get_extra_info("peername")
        if peer[0] == "127.0.0.9":
            raise error
        return real(own, *arguments)

    monkeypatch.setattr(kind, method, failing)
    host, port = address.removeprefix("http://").split(":")
    for sent in (REFUSED, b"\x00\r\n\r\n", REFUSED[:50]):
        for end in (socket.SHUT_WR, None):
            with socket.create_connection((host, int(port)), 5, ("127.0.0.9", 0)) as connection:
                connection.sendall(sent)
                if end is not None:
                    connection.shutdown(end)
                    received(connection)
            assert http.get("/health", timeout=5).status_code == 200
    assert not logged
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err


def test_an_answer_to_a_connection_that_has_had_its_last_one_is_dropped(address, http, logged, capsys):
    """Bytes that are no request get a 400, while the route of the request before them still works."""
    body = json.dumps(SMALL).encode()
    whole = head(Content_Length=len(body)) + b"\r\n\r\n" + body
    for rest in (b"\x00\r\n\r\n", b"GET\r\n\r\n"):
        for _ in range(5):
            with connect(address) as connection:
                connection.sendall(whole + rest)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    assert http.get("/health").status_code == 200
    output = capsys.readouterr()
    assert not logged and "Traceback" not in output.out + output.err


def test_turns_go_on_after_one_that_fails():
    planned, parsed = [], []

    class Loop:
        def call_soon(self, work, *arguments):
            planned.append((work, arguments))
            return self

        call_later = None  # nobody rests

        def cancel(self):
            planned.clear()

    class One:
        loop, spent, total = Loop(), 0.0, 0.0

        def __init__(self, address, fails):
            self.address, self.fails = address, fails

        def parse(self):
            if self.fails:
                raise RuntimeError("a fault of ours")
            parsed.append(self)

        def go_on(self): ...

    turns = Turns()
    for one in [One(turns.address_of(name), name == "a") for name in "abc"]:
        one.address.spent = 0.0 if one.fails else 1.0  # who fails comes first: a round may end after one turn
        turns.join(one)
    with pytest.raises(RuntimeError):
        planned.pop()[0](One.loop)
    while planned:
        work, arguments = planned.pop()
        work(*arguments)
    assert len(parsed) == 2
