"""A client of HTTP servers that speak JSON and streams of events."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR
from typing import Any
from urllib.parse import urlsplit

from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import parse_json

SECONDS = 330.0  # without a byte: a server may let a request wait for 300 s
LONGEST_LABEL = 63  # characters between two dots of a name
LONGEST_WAIT = 60.0  # seconds, whatever a server asks for
LARGEST = 1 << 28  # bytes of an answer


class Refusal(UserError):
    """An answer with an error status, in one sentence."""

    def __init__(self, sentence: str, status: int, retry_after: str | None):
        super().__init__(sentence)
        self.status = status
        seconds = float(retry_after) if retry_after and retry_after.isdecimal() else 1.0
        self.retry_after = min(seconds, LONGEST_WAIT)  # seconds


class HttpClient:
    """A server at an address such as http://127.0.0.1:5000. Every method raises UserError, one sentence, where the
    server does not answer, refuses the request or fails. `key`: which the server wants of its users."""

    def __init__(self, address: str, key: str | None = None):
        self.address, self._key = address.rstrip("/"), key
        try:
            parts = urlsplit(self.address)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        plain = self.address.isascii() and self.address.isprintable() and " " not in self.address
        labels = self._host.split(".")
        if (
            not self._host
            or not plain
            or max(map(len, labels)) > LONGEST_LABEL
            or parts.query
            or parts.fragment
            or "@" in parts.netloc
        ):
            raise UserError(f"{shown(address)} is not the address of a server; give one such as http://127.0.0.1:5000")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._prefix = parts.path
        self._open: set[HTTPConnection] = set()

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path."""
        return self._whole("GET", path, None)

    def send(self, path: str, body: dict[str, Any], method: str = "POST") -> dict[str, Any]:
        """Return the JSON object with which a path answers to another one."""
        return self._whole(method, path, body)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of the stream of events with which a path answers. Closing the iterator closes the
        connection, and the server ends its work on the request."""
        with self._response("POST", path, body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                event = self._object(data)
                if "error" in event:
                    raise UserError(f"{self.address}: {sentence_in(event) or 'the server failed'}")
                yield event
        raise UserError(f"{self.address} closed the connection before the answer was complete; ask again")

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._response(method, path, body) as response:
            return self._object(response.read(LARGEST))

    def close(self) -> None:
        """End all requests of other threads that are under way."""
        for connection in list(self._open):
            with suppress(OSError, AttributeError):  # of one that has ended since
                connection.sock.shutdown(SHUT_RDWR)

    @contextmanager
    def _response(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        """Send a request, and hold the connection for the length of the block."""
        connection = self._kind(self._host, self._port, timeout=SECONDS)
        self._open.add(connection)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response, path)
            yield response
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise UserError(
                f"{self.address} does not answer ({reason}); start a server with dtgpt serve MODEL, or give its address"
            ) from None
        except HTTPException as error:
            raise UserError(
                f"{self.address} does not answer as an HTTP server does ({type(error).__name__}); give another address"
            ) from None
        finally:
            self._open.discard(connection)
            connection.close()

    def _refusal(self, response: HTTPResponse, path: str) -> Refusal:
        try:
            sentence = sentence_in(parse_json(response.read(LARGEST)))
        except ValueError:
            sentence = None
        if sentence is None:
            sentence = f"{path} has status {response.status}; is this a server of dtgpt?"
        return Refusal(f"{self.address}: {sentence}", response.status, response.headers.get("Retry-After"))

    def _object(self, text: bytes) -> dict[str, Any]:
        try:
            value = parse_json(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{self.address} answers {shown(text)}, which is not a JSON object; give another address")
        return value


def sentence_in(answer: Any) -> str | None:
    """Return the message of an error, in OpenAI's form or in Megatron-LM's."""
    inner = answer.get("error", answer) if isinstance(answer, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message if isinstance(message, str) and message else None
