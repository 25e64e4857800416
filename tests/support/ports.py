"""Ports that nobody else gets between the moment in which they are chosen and that in which a program listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of this machine. A socket is bound to it without listening: the kernel gives the port to nobody who
    asks for any, a program that asks for this one gets it, and until then connections are refused."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
