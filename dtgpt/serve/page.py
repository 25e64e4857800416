"""The web page at `/`: files of this package, read once, so that nothing of a request ever names a file."""

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any, get_args, get_origin

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dtgpt.inference.options import OPTIONS
from dtgpt.inference.sampling import Option

FOLDER = "web"
LARGEST_EXACT = 2**53 - 1  # whole number of JavaScript
FIELDS = f"/{FOLDER}/options.js"  # generated from the declaration of the options
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Everything from this server only: a text that a model writes can neither load nor run anything.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks each time, and mostly gets 304
}


def routes(service: Any = None) -> list[Route]:
    """Return the routes of the page and of its files. The page itself asks the other routes; it needs no service."""
    found = []
    for file in sorted(files(__package__).joinpath(FOLDER).iterdir(), key=lambda file: file.name):
        endpoint = _file(file.read_bytes(), TYPES[file.name[file.name.rindex(".") :]])
        paths = [f"/{file.name}" if file.name.endswith(".html") else f"/{FOLDER}/{file.name}"]
        paths += ["/"] if file.name == "index.html" else []
        found += [Route(path, endpoint, methods=["GET"]) for path in paths]  # HEAD comes with GET
    made = f"export const OPTIONS = {json.dumps(fields(), indent=1)};\n".encode()
    return [*found, Route(FIELDS, _file(made, TYPES[".js"]), methods=["GET"])]


def fields() -> list[dict[str, Any]]:
    """Return the fields of the page for the declared options, in the form that `fields.js` explains."""
    return [_field(option) for option in OPTIONS.values() if option.offer.page is not None]


def _field(option: Option) -> dict[str, Any]:
    offer, page = option.offer, option.offer.page
    assert page is not None
    found: dict[str, Any] = {"name": offer.openai, "v1": offer.openai, "group": page.group, "label": page.label}
    found |= {"api": offer.megatron} if page.beams else {"mode": "sample"}
    if option.kind is bool:
        return found | {"kind": "switch", "initial": option.default}
    found["hint"] = option.help[:1].upper() + option.help[1:]
    if option.kind not in (int, float):
        kind = "biases" if get_origin(option.kind) is Mapping else "ids" if get_args(option.kind)[0] is int else "lines"
        return found | {"kind": kind, "initial": "", "example": page.example}
    least = option.least if page.least is None else page.least
    initial = option.default if offer.initial is None else offer.initial
    found |= {"kind": "number", "step": page.step, "min": least, "max": min(option.most, LARGEST_EXACT)}
    found["initial"] = "" if option.name == "seed" else initial  # no seed: the server draws one
    if page.slide:
        found["slide"] = page.slide
    if offer.initial is not None:  # the server has another default
        found["always"] = True
    return found


def _file(content: bytes, content_type: str) -> Any:
    headers = {**HEADERS, "Content-Type": content_type, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}

    async def endpoint(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={**headers})
        return Response(content, headers=headers)

    return endpoint
