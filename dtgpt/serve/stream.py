"""Answers that are sent while they are generated."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dtgpt.serve.problems import HttpProblem, error_object
from dtgpt.serve.service import watched
from dtgpt.serve.worker import ClientGone, Ticket

MORE = 10.0  # seconds beyond the time limit of a request in which a client may read the rest


class EventStream(Response):
    """Server-sent events of a ticket.

    events: whole events as bytes, `data: ...\\n\\n`, several in one piece where they came together. When the client
    goes away, the jobs end. When they fail, a last event has the error, as OpenAI's API sends it.
    """

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None):
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        self._ticket, self._events = ticket, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(Request(scope, receive), self._ticket):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async with asyncio.timeout(self._ticket.seconds_left + MORE):  # of a client that does not read
                    await self._send_events(send)
            except (ClientGone, TimeoutError):
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        try:
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ClientGone:
            raise
        except HttpProblem as problem:
            body = event(error_object(problem))
            await send({"type": "http.response.body", "body": body, "more_body": True})


def event(value: object) -> bytes:
    """Return an event that holds a value as JSON."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
