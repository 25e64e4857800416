"""Errors as answers: each family of paths has a form of its own.

`/api`: `{"message": ...}`, with the sentences of Megatron-LM's server where it has one. All other paths:
`{"error": {"message", "type", "param", "code"}}`, as OpenAI's API has it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response

from dtgpt.posttrain.chats.length import TooLong
from dtgpt.util.errors import UserError, shown_name

TOO_LONG = "context_length_exceeded"
INVALID_JSON, NOT_AN_OBJECT, ENCODED = "invalid_json", "not_an_object", "content_encoding"
MISUNDERSTOOD = "The browser (or proxy) sent a request that this server could not understand."
MEGATRON = {  # Megatron-LM's sentences for what its framework refuses, by code or status
    INVALID_JSON: MISUNDERSTOOD,
    ENCODED: MISUNDERSTOOD,
    NOT_AN_OBJECT: "prompts argument required",
    405: "The method is not allowed for the requested URL.",
    415: "Did not attempt to load JSON data because the request Content-Type was not 'application/json'.",
    500: "Internal Server Error",
}
FOLDERS = re.compile(r"(?<![\w.:/])(~|\.{1,2})?/([^\s/'\";:,()]+/)+")
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class HttpProblem(Exception):
    """A request that gets an answer with an error status.

    message: one sentence for the user. param: the key of the request that is wrong. code: a name of the error for
    programs. headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def bad_request(error: UserError, param: str | None = None) -> HttpProblem:
    """Return the problem of a request with a wrong value."""
    return HttpProblem(400, without_folders(str(error)), param, code=TOO_LONG if isinstance(error, TooLong) else None)


def without_folders(sentence: str) -> str:
    """Return a sentence with the last names of paths alone: how this machine's folders are called is no client's."""
    return FOLDERS.sub("", sentence)


def unknown_path(path: str, known: Iterable[str]) -> HttpProblem:
    """Return the problem of a request of a path that does not exist. `known`: the paths that do; the page's files are
    not listed."""
    listed = ", ".join(sorted(one for one in known if "." not in one))
    return HttpProblem(404, f"{shown_name(path)} is not a path of this server; use one of {listed}")


def answer(path: str, problem: HttpProblem) -> Response:
    """Return the answer to a request of `path`, in the form of its family."""
    if path == "/api":
        message = MEGATRON.get(problem.code or problem.status, problem.message)
        status = 503 if problem.status == 429 else problem.status
        body = json.dumps({"message": message}, separators=(",", ":")) + "\n"
        return Response(body, status, problem.headers, "application/json")
    return Response(json.dumps(error_object(problem)), problem.status, problem.headers, "application/json")


def error_object(problem: HttpProblem) -> dict[str, Any]:
    """Return a problem as OpenAI's API writes it, for an answer or an event of a stream."""
    otherwise = "server_error" if problem.status >= 500 else "invalid_request_error"
    kind = TYPES.get(problem.status, otherwise)
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}
