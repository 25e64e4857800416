"""Clients of a server on this machine, for `serve.py` and `soak.py`: plain HTTP/1.1 over loopback, which costs the
machine less than the server does.

As a program it reads the requests of each client as JSON from stdin, lets all clients send theirs, one after the other,
and writes the times of all answers to stdout:

    {"port": 5000, "clients": [[{"prompt": [1, 2], "max_tokens": 8}, ...], ...]}
"""

import asyncio
import json
import sys
import time
from typing import Any, NamedTuple

HOST = "127.0.0.1"
SECONDS = 600.0  # that an answer may take


class Answer(NamedTuple):
    """Times of a streamed answer, in seconds on the clock that processes share."""

    begin: float
    first: float  # arrival of the first event
    end: float
    text: str


class Client:
    """A connection that stays open."""

    def __init__(self, port: int, key: str = "none"):
        self._port, self._key = port, key
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, request: dict[str, Any]) -> Answer:
        """Return the answer to a completion that is streamed. Raise RuntimeError where it has an error."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        body = json.dumps({**request, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self._key}\r\n"
        begin = time.monotonic()
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        first, pieces = 0.0, []
        async for chunk in _chunks(self._reader):
            first = first or time.monotonic()
            pieces.append(chunk)
        end = time.monotonic()
        events = [line[6:] for line in b"".join(pieces).split(b"\n") if line.startswith(b"data: ")]
        if not events or events[-1] != b"[DONE]":
            raise RuntimeError(f"an answer ends with {events[-1:]!r}")
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        return Answer(begin, first, end, text)

    def close(self) -> None:
        """Leave without a word."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _chunks(reader: asyncio.StreamReader):
    """Yield the parts of a chunked body. Raise RuntimeError for any answer but status 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode().splitlines()[0])
    while True:
        size = int(await reader.readline(), 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:-2]


async def run_clients(port: int, clients: list[list[dict[str, Any]]]) -> list[list[Answer]]:
    """Let all clients send their requests, each one after the other."""

    async def one(requests: list[dict[str, Any]]) -> list[Answer]:
        client = Client(port)
        try:
            return [await asyncio.wait_for(client.stream(request), SECONDS) for request in requests]
        finally:
            client.close()

    return await asyncio.gather(*map(one, clients))


def main() -> None:
    work = json.load(sys.stdin)
    json.dump(asyncio.run(run_clients(work["port"], work["clients"])), sys.stdout)


if __name__ == "__main__":
    main()
