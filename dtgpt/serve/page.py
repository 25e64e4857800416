"""The web page at `/`: files of this package, read once, so that nothing of a request ever names a file."""

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple, get_args, get_origin

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dtgpt.inference.options import INITIAL, Option
from dtgpt.serve.megatron_request import OPTION_KEYS as MEGATRON_KEYS
from dtgpt.serve.openai_keys import OPTION_KEYS as KEYS

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


class Control(NamedTuple):
    """How the page offers an option. `slide`: the end of its slider; 0: none. `example`: of a text to type. `beams`:
    whether it counts in a beam search, too."""

    group: str
    label: str
    step: float = 1
    least: float | None = None  # number that the page takes, where it is above the bound
    slide: float = 0
    example: str = ""
    beams: bool = False


CONTROLS = {
    "max_new_tokens": Control("main", "Length", least=1, slide=1024, beams=True),
    "min_new_tokens": Control("end", "Length at least"),
    "temperature": Control("main", "Temperature", step=0.05, slide=2),
    "top_k": Control("main", "Top k"),
    "top_p": Control("main", "Top p", step=0.01, slide=1),
    "top_p_decay": Control("more", "Top p decay", step=0.01),
    "top_p_bound": Control("more", "Top p bound", step=0.01),
    "min_p": Control("main", "Min p", step=0.01, slide=1),
    "frequency_penalty": Control("penalties", "Frequency penalty", step=0.1),
    "presence_penalty": Control("penalties", "Presence penalty", step=0.1),
    "logit_bias": Control("penalties", "Logit bias", example="50256: -100, 198: 2.5"),
    "no_repeat_ngram_size": Control("penalties", "No n-gram twice"),
    "prevent_newline_after_colon": Control("more", "No line end after a colon", beams=True),
    "seed": Control("more", "Seed", least=0),
    "stop_token_ids": Control("end", "Stop at ids", example="50256, 198"),
    "stop_on_eol": Control("end", "Stop at a line end"),
    "stop_on_double_eol": Control("end", "Stop at an empty line"),
    "num_return_sequences": Control("main", "Answers"),
    "stop_strings": Control("end", "Stop at", example="\\n\\n"),
}


def fields() -> list[dict[str, Any]]:
    """Return the fields of the page for its options, in the form that `fields.js` explains."""
    return [_field(key, option, CONTROLS[option.name]) for key, option in KEYS.items() if option.name in CONTROLS]


def _field(key: str, option: Option, page: Control) -> dict[str, Any]:
    found: dict[str, Any] = {"name": key, "v1": key, "group": page.group, "label": page.label}
    found |= {"api": MEGATRON_KEYS[option.name]} if page.beams else {"mode": "sample"}
    if option.kind is bool:
        return found | {"kind": "switch", "initial": option.default}
    found["hint"] = option.help[:1].upper() + option.help[1:]
    if option.kind not in (int, float):
        kind = "biases" if get_origin(option.kind) is Mapping else "ids" if get_args(option.kind)[0] is int else "lines"
        return found | {"kind": kind, "initial": "", "example": page.example}
    least = option.least if page.least is None else page.least
    found |= {"kind": "number", "step": page.step, "min": least, "max": min(option.most, LARGEST_EXACT)}
    initial = INITIAL.get(option.name, option.default)
    found["initial"] = "" if option.name == "seed" else initial  # no seed: the server draws one
    if page.slide:
        found["slide"] = page.slide
    if option.name in INITIAL:  # the server has another default
        found["always"] = True
    return found


def _file(content: bytes, content_type: str) -> Any:
    headers = {**HEADERS, "Content-Type": content_type, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}

    async def endpoint(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={**headers})
        return Response(content, headers=headers)

    return endpoint
