"""Connections of clients, on uvicorn's protocol: they are parsed a little at a time, by turns of the clients'
addresses, and a client that has ended its half of a connection still gets its answer.

The event loop answers everybody, so that nobody may hold it up: a body of one-byte chunks takes 10 µs a byte.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import wraps
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtgpt.serve.access import client_of
from dtgpt.serve.body import DISCARDED, FRAMING, MOST_FRAMING
from dtgpt.serve.log import log
from dtgpt.util.errors import shown

PIECE = 2048  # bytes that are parsed at once: 4 ms of one-byte chunks
ROUND = 0.002  # seconds after which the rest of the event loop comes before further pieces
LIGHT = 0.0005  # seconds for a piece that is free: most requests are a single one
BURST = 0.1  # seconds beyond them that an address has at once; then the engine, which shares Python's lock, has
RATE = 0.25  # the rest of each second
LINGER, LATE = 2.0, 2**22  # seconds and bytes that are read, and dropped, after an answer to half a request
LOOK = 0.2  # seconds between two looks at whether a client that has ended its half has gone altogether
BEGIN = b"HTTP/1.1 "  # of any answer


def contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a failure of a connection's method end this connection alone: the event loop and the turns of all others go
    on, and the log has a line."""

    @wraps(method)
    def run(connection: "Connection", *arguments: Any) -> Any:
        try:
            return method(connection, *arguments)
        except Exception as error:
            log(f"a connection has failed and is closed ({shown(f'{type(error).__name__}: {error}')})")
            return connection.transport.abort()

    return run


class Parser(h11.Connection):
    """A parser of requests that counts what surrounds their bodies, and can begin an answer before it is known."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.wire = self.framing = 0  # bytes of a request after its head, and those of them that are not its body
        self._begun = b""

    def receive_data(self, data: bytes) -> None:
        self.wire += len(data)
        self.framing += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.wire = self.framing = len(self.trailing_data[0])
        elif isinstance(event, h11.Data):
            self.framing -= len(event.data)
        return h11.NEED_DATA if isinstance(event, h11.ConnectionClosed) else event  # uvicorn would ask forever

    def begin(self) -> bytes:
        """Return the first bytes of the next answer, which `send` then leaves out."""
        self._begun = BEGIN
        return BEGIN

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self.our_state in (h11.MUST_CLOSE, h11.CLOSED) and not isinstance(event, h11.ConnectionClosed):
            return b""  # the connection has had its last answer, to bytes that were no request
        data = super().send(event)
        if data and self._begun:
            data, self._begun = data.removeprefix(self._begun), b""
        return data


class Connection(H11Protocol):
    """The connection of a client. What it has read waits for its turns; the rest waits in the kernel."""

    def __init__(self, turns: "Turns", **uvicorn: Any):
        super().__init__(**uvicorn)
        self.conn: Parser = Parser()
        self.address: Address = Address()
        self.spent = self.total = 0.0  # seconds of parsing: on the clock of its address; in all
        self.waits = False  # for its turn
        self._turns, self._read = turns, bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Lingering(self, transport)))
        self.flow = Flow(self)
        self.address = self._turns.address_of(client_of(self.client))

    @contained
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return cast(Lingering, self.transport).drop(len(data))
        self._read += data
        self.go_on()

    @contained
    def go_on(self) -> None:
        """Wait for a turn where there is something to parse, else read on."""
        if not self._read:
            return None if self.flow.read_paused else self.transport.resume_reading()
        self.transport.pause_reading()
        if not (self.waits or self.flow.read_paused):
            self._turns.join(self)

    @contained
    def parse(self) -> None:
        """Parse a piece of what was read."""
        piece = bytes(self._read[:PIECE])
        del self._read[:PIECE]
        self._parse(piece)

    def _parse(self, piece: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            super().data_received(piece)
        except h11.LocalProtocolError:  # bytes that are not a request, after the answer has begun
            return self.transport.close()
        if self.cycle is not None:
            self.scope[FRAMING] = self.conn.framing  # type: ignore[literal-required]
            if self.cycle.response_complete and (self.conn.framing > MOST_FRAMING or self.conn.wire > DISCARDED):
                self.transport.close()  # nobody reads this body: it was refused for its head

    @contained
    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers that the client waits for: it has ended its half alone, perhaps. Where it
        is gone altogether, its machine refuses what we send, which is the beginning of the answer."""
        self._parse(b"")
        if not self._owes:
            return False
        if not self.cycle.response_started:
            self.transport.write(self.conn.begin())
        self._look()
        return True

    @property
    def _owes(self) -> bool:
        """Whether a client that has ended its half still waits for an answer."""
        return self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()

    @contained
    def _look(self) -> None:
        if self._owes and self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif self._owes:
            self.loop.call_later(LOOK, self._look)
        else:
            self.transport.close()


class Flow(FlowControl):
    """Lets a connection read on after what it has read already."""

    def __init__(self, connection: Connection):
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._connection.go_on()


class Lingering:
    """The transport of a connection. Where it is closed amid a request, it ends its half at once, and reads on for a
    while: a client that still sends would get a reset in place of the answer."""

    def __init__(self, connection: Connection, transport: asyncio.Transport):
        self._connection, self._transport = connection, transport
        self._closing, self._dropped = False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self._closing:  # its half has ended
            self._transport.write(data)

    def drop(self, count: int) -> None:
        """Count bytes that arrived since the end, of which there may be few."""
        self._dropped += count
        if self._dropped > LATE:
            self._transport.close()

    def close(self) -> None:
        if (cycle := self._connection.cycle) is not None:  # whose route may still wait for the rest, or answer
            cycle.disconnected = True
            cycle.message_event.set()
        if self.is_closing() or self._connection.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return self._transport.close()
        self._closing = True
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection
            return self._transport.abort()
        self._transport.resume_reading()
        self._connection.loop.call_later(LINGER, self._transport.close)


class Address:
    """The connections of a client's address that wait for their turn."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, float, int, Connection]] = []  # a heap, by the time spent on them
        self.spent = self.now = 0.0  # its time on the clock of all; the clock of its own connections
        self.load = self.then = 0.0  # seconds of parsing beyond its rate, and when that was
        self.rests = 0.0  # until this time

    def charge(self, seconds: float) -> None:
        """Note the time of a turn, and rest after too much of it."""
        self.spent += seconds
        now = time.perf_counter()
        self.load = max(0.0, self.load - RATE * (now - self.then)) + max(0.0, seconds - LIGHT)
        self.then, self.rests = now, now + max(0.0, self.load - BURST) / RATE


class Turns:
    """Who is parsed next: of the address on which the least time was spent, the connection on which the least was.
    Who comes, or comes back, begins at the time of who was served last (start-time fair queueing)."""

    def __init__(self) -> None:
        self._addresses: WeakValueDictionary[str, Address] = WeakValueDictionary()
        self._active: set[Address] = set()
        self._now, self._order = 0.0, count()
        self._next: asyncio.Handle | None = None  # the round that is to come

    def address_of(self, name: str) -> Address:
        """Return the address of this name, which lasts as long as its connections."""
        return self._addresses.setdefault(name, Address())

    def join(self, connection: Connection) -> None:
        """Let a connection wait for its turn."""
        address = connection.address
        if not address.waiting:
            address.spent = max(address.spent, self._now)
            self._active.add(address)
        connection.waits, connection.spent = True, max(connection.spent, address.now)
        heappush(address.waiting, (connection.spent, connection.total, next(self._order), connection))
        self._plan(connection.loop)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next round come when the first address does not rest any more."""
        if self._next is not None:
            self._next.cancel()
        seconds = min(address.rests for address in self._active) - time.perf_counter()
        self._next = loop.call_later(seconds, self._round, loop) if seconds > 0 else loop.call_soon(self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        begin = now = time.perf_counter()
        try:
            while now < begin + ROUND and (ready := [address for address in self._active if address.rests <= now]):
                self._turn(min(ready, key=lambda address: address.spent))
                now = time.perf_counter()
        finally:  # whatever fails: nobody else would let the others go on
            if self._active:
                self._plan(loop)

    def _turn(self, address: Address) -> None:
        self._now = address.spent
        address.now, _, _, connection = heappop(address.waiting)
        connection.waits = False
        if not address.waiting:
            self._active.remove(address)
        begin = time.thread_time()  # not that in which another thread, or another process, had its turn
        connection.parse()
        seconds = time.thread_time() - begin
        connection.spent += seconds
        connection.total += seconds
        address.charge(seconds)
        connection.go_on()
