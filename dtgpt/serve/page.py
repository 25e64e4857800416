"""The web page at `/`: one file of this package, which asks the other routes.

The page is read and filled in once, so that nothing of a request names a file. Its policy lets a browser run the
file's own script, which it knows by its hash, and ask this server alone: a text that a model writes can neither load
nor run anything.
"""

import base64
import html
import re
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dtgpt.data.library_tokenizers.chat_template import KEY
from dtgpt.serve.service import Service


def routes(service: Service) -> list[Route]:
    """Return the routes of the page."""
    page = files(__package__).joinpath("web/page.html").read_text(encoding="utf-8")
    tokenizer = service.model.known_tokenizer
    talks = tokenizer is not None and KEY in tokenizer.additions
    content = page.replace("{{chat}}", "yes" * talks).replace("{{model}}", html.escape(service.model_id)).encode()
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # a browser asks each time, and mostly gets 304
        "ETag": f'"{sha256(content).hexdigest()[:32]}"',
    }

    async def answer(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return [Route(path, answer, methods=["GET"]) for path in ("/", "/index.html")]  # HEAD comes with GET


def policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: its own script and style, by their hashes, and no others."""
    (script,), (style,) = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src '{hash_of(script)}'; style-src '{hash_of(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def hash_of(text: str) -> str:
    """Return a text's hash in the form of policies."""
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
