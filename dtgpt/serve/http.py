"""uvicorn in a thread of its own, next to the engine's."""

import asyncio
import errno
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import uvicorn
from starlette.types import ASGIApp

from dtgpt.serve.connection import Connection, Turns
from dtgpt.util.errors import UserError, shown

BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE = 30  # seconds that a connection stays open without a request
SILENT = 60.0  # seconds after which a connection ends that has not sent a whole request, or reads nothing
TICK = 5  # seconds between two looks at the connections
FLUSH = 5  # seconds that answers under way have at the end


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has an address, which does not listen yet: it shows before weights are read whether the
    address can be used. Raise UserError where it cannot."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {shown(host)} is not an address ({reason}); use one of this machine") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: those that read nothing end
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT))
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _in_use(host, port, error) from None
    return listener


def _in_use(host: str, port: int, error: OSError) -> UserError:
    remedies = {
        errno.EADDRINUSE: "use another one with --port, or end its user",
        errno.EACCES: "use a port from 1024 on with --port",
    }
    remedy = remedies.get(error.errno or 0, "give an address of this machine with --host")
    return UserError(f"{host} port {port} cannot be used ({error.strerror or error}); {remedy}")


def allow_many_connections() -> None:
    """Raise the number of files that this process may open to its limit: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class HttpServer:
    """An application that answers on a listener; its event loop runs in a thread of its own. `watch`: is called every
    few seconds on the event loop. `ended`: is called when the thread ends, also after an error."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        watch: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ):
        self._listener, self._watch, self._ended = listener, watch, ended
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(Connection, Turns())),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            log_level="critical",  # `Guard` has its own log, and requests that the end interrupts are not faults
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=FLUSH,
            timeout_notify=TICK,
            callback_notify=self._tick,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._error: OSError | None = None
        self._idle: WeakKeyDictionary[asyncio.Protocol, tuple[int, int]] = WeakKeyDictionary()

    def start(self) -> None:
        """Listen. Raise UserError where another process took the address since."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.005)
        if self._error is not None:
            raise _in_use(self._listener.getsockname()[0], self.port, self._error)

    def stop(self) -> None:
        """Send what is under way, and close all connections."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(FLUSH + 3)

    def _run(self) -> None:
        try:
            self._server.run([self._listener])  # which leaves signals alone outside of the main thread
        except OSError as error:
            self._error = error
        finally:
            self._ended()

    async def _tick(self) -> None:
        self._watch()
        self._close_silent()

    def _close_silent(self) -> None:
        """Close connections on which the beginning of a request has been waiting for the rest for too long. uvicorn
        itself does so only after an answer, where nothing at all arrives."""
        for connection in list(self._server.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                self._idle.pop(connection, None)
                continue
            before, ticks = self._idle.get(connection, (id(cycle), 0))
            ticks = ticks + 1 if before == id(cycle) else 0
            self._idle[connection] = id(cycle), ticks
            transport = getattr(connection, "transport", None)
            if ticks * TICK > SILENT and transport is not None:
                transport.close()
