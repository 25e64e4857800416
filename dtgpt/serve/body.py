"""The JSON body of a request, read strictly and within limits."""

import asyncio
import json
import math
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.problems import ENCODED, INVALID_JSON, NOT_AN_OBJECT, HttpProblem
from dtgpt.serve.service import SIZE, in_thread_if_long
from dtgpt.util.console import byte_size
from dtgpt.util.errors import shown, shown_name

CLOSE = {"Connection": "close"}  # for requests whose body is not read to its end
DISCARDED = 2**24  # bytes beyond the limit that are read: a client that still sends would not see the answer
FRAMING = "dtgpt.framing"  # in the scope of a request: bytes that surround its body, so far
MOST_FRAMING = 2**17  # of 26,000 chunks of a byte each; of chunks of 64 bytes, for a body of 1 MiB
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


async def read_json(request: Request, limits: RequestLimits) -> dict[str, Any]:
    """Return the JSON object that a request has as its body.

    Raise HttpProblem: 415 for another content type or a compressed body, 413 for a body that is too long, 408 for one
    that arrives too slowly, 400 for anything but strict JSON: NaN, Infinity, numbers out of range, keys that come
    twice, nesting, halves of surrogate pairs.
    """
    check_content_type(request)
    body = await _read(request, limits)
    request.scope[SIZE] = len(body)
    return await in_thread_if_long(request, parse_object, body, limits)


def check_content_type(request: Request) -> None:
    """Raise HttpProblem where the body is not declared as plain JSON. A page of another site can then not send a
    request without asking first."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not re.fullmatch(r"application/[\w.!#$&^-]+\+json", kind):
        what = f"the Content-Type is {shown(given)}" if given else "there is no Content-Type"
        raise HttpProblem(415, f"{what}; send JSON, with Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        sentence = f"the Content-Encoding is {shown(coding)}; send the body as it is, without compression"
        raise HttpProblem(415, sentence, code=ENCODED)


async def _read(request: Request, limits: RequestLimits) -> bytes:
    sentence = f"the body has more than {byte_size(limits.body)}; send a shorter request"
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 20 or int(declared) > limits.body + DISCARDED):
        raise HttpProblem(413, sentence, headers=CLOSE)
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for piece in request.stream():
                if request.scope.get(FRAMING, 0) > MOST_FRAMING:
                    raise HttpProblem(413, "the chunks of the body are too small; send larger ones", headers=CLOSE)
                size += len(piece)
                if size > limits.body + DISCARDED:
                    raise HttpProblem(413, sentence, headers=CLOSE)
                if size <= limits.body:
                    body += piece
    except TimeoutError:
        sentence = f"the body did not arrive within {limits.read_seconds:g} s; send it at once"
        raise HttpProblem(408, sentence, headers=CLOSE) from None
    except ClientDisconnect:
        raise HttpProblem(400, "the connection ended before the body was complete", headers=CLOSE) from None
    if size > limits.body:
        raise HttpProblem(413, sentence)
    return bytes(body)


def parse_object(body: bytes, limits: RequestLimits) -> dict[str, Any]:
    """Return the JSON object in `body`. Raise HttpProblem 400 for anything else."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    _check_nesting(text, limits.nesting)
    try:
        value = json.loads(
            text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole
        )
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg.removesuffix(' at')} at character {error.pos}") from None
    if "\\u" in text:
        _check_unicode(value)
    if not isinstance(value, dict):
        sentence = f'the body is {shown(value)}, not a JSON object; send one, such as {{"prompt": "Hello"}}'
        raise HttpProblem(400, sentence, code=NOT_AN_OBJECT)
    return value


def _invalid(why: str) -> HttpProblem:
    return HttpProblem(400, f"the body is not JSON ({why}); send a JSON object", code=INVALID_JSON)


def _check_nesting(text: str, most: int) -> None:
    if text.count("[") + text.count("{") <= most:
        return
    level = 0
    for found in BRACKETS.finditer(text):
        character = found[0][0]
        if character in "[{":
            level += 1
            if level > most:
                raise HttpProblem(400, f"the body nests more than {most} lists and objects; send a flatter one")
        elif character in "]}":
            level -= 1


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise HttpProblem(400, f"the key {shown_name(key)} comes twice; send it once")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise HttpProblem(400, f"{name} is not a number of JSON; send a finite number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise HttpProblem(400, f"{shown_name(digits)} is out of the range of numbers; send a smaller one")
    return number


def _whole(digits: str) -> int:
    if len(digits) > 1000:  # converting takes time that grows with its square
        raise HttpProblem(400, f"a number has {len(digits):,} digits; send a smaller one")
    return int(digits)


def _check_unicode(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            sentence = f"{shown(value)} has half of a surrogate pair, which is not a character; leave it out"
            raise HttpProblem(400, sentence) from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_unicode(key)
            _check_unicode(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_unicode(inner)
