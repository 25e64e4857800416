"""The web page at `/`: files of this package, read once, so that nothing of a request ever names a file."""

from hashlib import sha256
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = "web"
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
        paths = ["/", "/index.html"] if file.name == "index.html" else [f"/{FOLDER}/{file.name}"]
        found += [Route(path, endpoint, methods=["GET"]) for path in paths]  # HEAD comes with GET
    return found


def _file(content: bytes, content_type: str) -> Any:
    headers = {**HEADERS, "Content-Type": content_type, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}

    async def endpoint(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={**headers})
        return Response(content, headers=headers)

    return endpoint
