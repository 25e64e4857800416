"""What every request passes: checks of host and key, who its client is, the log, the count, and answers for faults
inside."""

import hmac
import ipaddress
import json
import re
import socket
import sys
import time
import traceback
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtgpt.serve.log import log, takes
from dtgpt.serve.problems import HttpProblem, answer, unknown_path
from dtgpt.serve.service import CLIENT, TICKET, Service
from dtgpt.serve.ticket import Ticket
from dtgpt.util.console import say_error
from dtgpt.util.errors import shown

GONE = 499  # in log and metrics: the client went away before it had an answer
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(\[(?P<ip6>[0-9a-f.]*:[0-9a-f:.]*)\]|(?P<name>[a-z0-9._-]+))(:(?P<port>[0-9]{0,9}))?")
LAST_PORT = 65535
LONGEST_PATH = 200  # characters in the log
NETWORK = 64  # bits of an IPv6 address that its owner cannot choose


class Guard:
    """Middleware of the whole application.

    paths: which metrics tell apart. open_paths: which need no key.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str], open_paths: frozenset[str]):
        self._app, self._service = app, service
        self._paths, self._open_paths = paths, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin, status, sent = time.monotonic(), GONE, 0

        async def counting_send(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            if problem := self._refusal(Request(scope)):
                await answer(scope["path"], problem)(scope, receive, counting_send)
            else:
                await self._app(scope, receive, counting_send)
        except Exception:
            if takes(sys.stderr):
                say_error(traceback.format_exc())
            if status != GONE:  # an answer has begun: the connection ends
                raise
            problem = HttpProblem(500, "the server has failed at this request; its log says more")
            await answer(scope["path"], problem)(scope, receive, counting_send)
        finally:
            self._note(scope, status, sent, time.monotonic() - begin)

    def _refusal(self, request: Request) -> HttpProblem | None:
        """Return why a request is not let through, None where it is."""
        host, hosts = request.headers.get("host", ""), self._service.hosts
        if hosts is not None and host_name(host) not in hosts:
            names = ", ".join(sorted(hosts))
            sentence = f"the Host header is {shown(host)}, but this server answers for {names} only"
            return HttpProblem(403, f"{sentence}; use one of these in the address")
        path, keys = request.scope["path"], (self._service.api_key or "").split(",")
        mine = [number for number, key in enumerate(keys, 1) if has_key(request, key)]  # always all: no time tells
        CLIENT.set(f"key {mine[0]}" if mine and keys[1:] else client_of(request.scope.get("client")))
        if self._service.api_key is not None and path not in self._open_paths and not mine:
            sentence = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            return HttpProblem(401, sentence, headers={"WWW-Authenticate": "Bearer"}, code="invalid_api_key")
        if request.method in ("POST", "PUT") and (ending := self._service.worker.ending):
            return ending
        # Starlette's routes take a newline for the end.
        return unknown_path(path, self._paths) if path.endswith("\n") else None

    def _note(self, scope: Scope, status: int, sent: int, seconds: float) -> None:
        """Count a request, and write its line of the log."""
        path = scope["path"]
        metrics = self._service.metrics
        metrics.requests.add(1, path if path in self._paths else "other", str(status))
        metrics.request_seconds.observe(seconds)
        if self._service.log_requests:
            log(line_of(scope, status, sent, seconds))


def host_name(header: str) -> str | None:
    """Return the name or address in a Host header, without the port; None for anything but host[:port] of RFC 3986,
    where an IPv6 address, and nothing else, is in brackets."""
    found = HOST.fullmatch(header.lower())
    if found is None or int(found["port"] or 0) > LAST_PORT:
        return None
    return found["ip6"] or found["name"].removesuffix(".")


def has_key(request: Request, key: str) -> bool:
    """Return whether a request has this key; the time that takes tells nothing of it."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(given.strip().encode(), key.encode()) and kind.lower() == "bearer"


def client_of(address: Any) -> str:
    """Return the name of the client at an address (host, port): an IPv4 address, or the network of an IPv6 address,
    whose owner has 2^64 of them."""
    host = str(address[0]).partition("%")[0] if address else "-"
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if found.version == 4 or found.is_loopback:
        return host
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), NETWORK), strict=False))


def is_loopback(address: str) -> bool:
    """Return whether an IP address can only be reached from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def names_of(host: str, listener: socket.socket) -> frozenset[str] | None:
    """Return the names that a Host header may have; None, which is any, where other machines reach the server."""
    address = listener.getsockname()[0]
    return LOOPBACK_NAMES | {host.lower(), address} if is_loopback(address) else None


def line_of(scope: Scope, status: int, sent: int, seconds: float) -> str:
    """Return the log's line of a request: nothing that a client wrote but its method and path."""
    address = (scope.get("client") or ("-",))[0]
    path = scope["path"]
    shown_path = path if path.isprintable() and len(path) <= LONGEST_PATH else json.dumps(path[:LONGEST_PATH])
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = f"{now} {address} {shown(scope['method'])[1:-1]} {shown_path} {status} {sent} bytes {seconds:.3f} s"
    ticket: Ticket | None = scope.get(TICKET)
    if ticket is None:
        return line
    line += f", {ticket.prompt_tokens} + {ticket.new_tokens} tokens"
    return line if ticket.first is None else f"{line}, first after {ticket.first - ticket.started:.3f} s"
