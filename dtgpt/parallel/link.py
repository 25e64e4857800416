"""A TCP connection to the process of the next rank, over which nothing is sent: the kernel closes it when that process
ends, however it ends."""

import ipaddress
import os
import secrets
import selectors
import socket
import time
from contextlib import suppress

WAIT = 2.0  # seconds for a connection to be made
AGAIN = 5.0  # seconds until a connection that could not be made is tried again
MOST = 16  # connections of others to this process; one is needed
NONCE = 8  # bytes


class Link:
    """The two ends of this process: a socket at which another process follows it, and the connection with which it
    follows another one."""

    def __init__(self) -> None:
        """Raises OSError where the system gives no socket."""
        self._nonce = secrets.token_bytes(NONCE)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=MOST, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._followers: list[socket.socket] = []
        self._target: tuple[str, int, str] | None = None
        self._connection: socket.socket | None = None
        self._was_connected, self._next_try = False, 0.0

    @property
    def place(self) -> tuple[str, int, str]:
        """The address and port where another process finds this one, and the nonce by which it knows it."""
        return own_address(), self._listener.getsockname()[1], self._nonce.hex()

    def follow(self, address: str, port: int, nonce: str) -> None:
        """Follow the process at this `place` from now on."""
        self._target = address, port, nonce

    def turn(self, seconds: float) -> bool:
        """Handle for `seconds` what comes in, or less where something does; return whether the process that this one
        follows is gone for certain."""
        gone = False
        if self._target and self._connection is None and time.monotonic() >= self._next_try:
            gone = self._connect()
        for key, _ in [] if gone else self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            else:
                gone = self._is_closed() and self._connect()
        return gone

    def close(self) -> None:
        self._selector.close()
        for end in (self._listener, self._connection, *self._followers):
            if end is not None:
                end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            follower = self._listener.accept()[0]
            follower.setblocking(False)
            follower.send(self._nonce)
            self._followers.append(follower)
        while len(self._followers) > MOST:  # the one that is needed connects again
            self._followers.pop(0).close()

    def _is_closed(self) -> bool:
        try:
            if self._connection is None or self._connection.recv(NONCE):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._selector.unregister(self._connection)
        self._connection.close()
        self._connection = None
        return True

    def _connect(self) -> bool:
        """Try to connect; return whether a process to which there was a connection is gone: nobody, or another
        process, has its port."""
        self._next_try = time.monotonic() + AGAIN
        if self._target is None:
            return False
        *place, expected = self._target
        connection = None
        try:
            connection = socket.create_connection((place[0], place[1]), timeout=WAIT)
            nonce = connection.recv(NONCE)
        except ConnectionRefusedError:
            return self._was_connected
        except OSError:  # perhaps a slow network: heartbeats decide
            if connection is not None:
                connection.close()
            return False
        if nonce.hex() != expected:
            connection.close()
            return self._was_connected
        connection.setblocking(False)
        self._connection, self._was_connected = connection, True
        self._selector.register(connection, selectors.EVENT_READ)
        return False


def own_address() -> str:
    """Return the address of this machine in the network of `MASTER_ADDR`; on the machine that has it, that name."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    with suppress(OSError, ValueError):
        family, _, _, _, target = socket.getaddrinfo(master, int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = probe.getsockname()[0]
            if address != target[0] and not ipaddress.ip_address(address).is_loopback:
                return address
    return master
