"""The routes of a server, with the checks before them."""

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from dtgpt.serve import megatron, openai, page, tokens
from dtgpt.serve.access import Guard
from dtgpt.serve.problems import HttpProblem, answer, bad_request, unknown_path
from dtgpt.serve.service import Service
from dtgpt.util.errors import UserError, shown_name


def make_app(service: Service) -> Starlette:
    """Return the application: the checks of `Guard`, then all routes, with errors as answers."""
    pages = page.routes(service)
    routes = [*status_routes(service), *megatron.routes(service), *openai.routes(service), *tokens.routes(service)]
    open_paths = {"/health", *paths_of(pages)}  # a browser cannot send a key for a page
    routes += pages
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, service=service, paths=paths_of(routes), open_paths=frozenset(open_paths))],
        exception_handlers=dict.fromkeys((HttpProblem, UserError, HTTPException), _answer_error),
    )
    app.router.redirect_slashes = False
    return app


def paths_of(routes: Iterable[BaseRoute]) -> frozenset[str]:
    """Return the paths of routes, without those that have parameters: the number of paths in metrics is bounded."""
    return frozenset(route.path for route in routes if isinstance(route, Route) and "{" not in route.path)


def status_routes(service: Service) -> list[Route]:
    """Return the routes that tell how the server is."""

    async def health(request: Request) -> Response:
        status = service.worker.status()
        told = {"status": status.state, "model": service.model_id}
        return JSONResponse(told, 200 if status.healthy else 503, headers={"Cache-Control": "no-store"})

    async def metrics(request: Request) -> Response:
        status = service.worker.status()
        gauges: dict[str, tuple[str, float | dict[str, int]]] = {
            "dtgpt_client_sequences": ("Sequences that wait or are generated, by client.", status.clients),
            "dtgpt_waiting": ("Sequences that wait for a slot.", status.waiting),
            "dtgpt_running": ("Sequences that are generated.", status.running),
            "dtgpt_slots": ("Sequences that are generated at the same time, at most.", status.slots),
            "dtgpt_ready": ("1 where the server takes requests.", int(status.healthy)),
        }
        return Response(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    return [Route("/health", health), Route("/metrics", metrics)]


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer what a route raises, and what the framework refuses: a path or a method that does not exist."""
    path = request.scope["path"]
    if isinstance(error, UserError):
        error = bad_request(error)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        error = unknown_path(path, paths_of(request.app.routes))
    elif isinstance(error, HTTPException):
        headers, sentence = dict(error.headers or {}), str(error.detail)
        if error.status_code == 405:
            allowed = headers.get("Allow", "another one")
            sentence = f"{shown_name(request.method)} is not a method of this path; use {allowed}"
        error = HttpProblem(error.status_code, sentence, headers=headers)
    assert isinstance(error, HttpProblem)
    return answer(path, error)
