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
AGAIN = 1.0  # seconds until a connection that could not be made is tried again: well within a wait for a verdict
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
        self._bell = socket.socketpair()
        for end in (self._listener, self._bell[0]):
            self._selector.register(end, selectors.EVENT_READ)
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
        follows is gone for certain: nobody has its port on this machine, or nobody, or another process, where there
        was a connection before."""
        if self._target and self._connection is None and time.monotonic() >= self._next_try and self._connect():
            return True
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._connection and self._receive():
                return True
        return False

    def wake(self) -> None:
        """Let a `turn` in another thread return soon."""
        with suppress(OSError):
            self._bell[1].send(b"0")

    def close(self) -> None:
        self._selector.close()
        for end in (self._listener, self._connection, *self._bell, *self._followers):
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

    def _receive(self) -> bool:
        """Read the nonce of the process at the other end, or meet the end of the connection; return as `turn`."""
        try:
            nonce = self._connection.recv(NONCE) if self._connection else b""
        except BlockingIOError:
            return False
        except OSError:
            nonce = b""
        if self._target and nonce.hex() == self._target[2]:
            self._was_connected = True
            return False
        self._drop()
        return (self._was_connected and bool(nonce)) or self._connect()

    def _drop(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _connect(self) -> bool:
        """Try to connect; return as `turn`."""
        self._next_try = time.monotonic() + AGAIN
        if self._target is None:
            return False
        try:
            connection = socket.create_connection(self._target[:2], timeout=WAIT)
        except ConnectionRefusedError:  # on another machine perhaps by what stands between the two
            return self._was_connected or self._target[0] == own_address()
        except OSError:  # perhaps a slow network: heartbeats decide
            return False
        connection.setblocking(False)
        self._connection = connection
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
