"""The route of Megatron-LM's text generation server: `PUT /api`."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dtgpt.serve.body import read_json
from dtgpt.serve.megatron_jobs import answer, make_jobs
from dtgpt.serve.megatron_request import read_request
from dtgpt.serve.service import SEED, Service, draw_seed, in_thread, watched


def routes(service: Service) -> list[Route]:
    """Return the route of `PUT /api`, on a service."""

    async def generate(request: Request) -> Response:
        api = read_request(await read_json(request, service.limits))
        seed = draw_seed() if api.random_seed is None else api.random_seed
        tokenizer = service.tokenizer
        jobs = await in_thread(request, make_jobs, api, tokenizer, service.config, seed)
        ticket = service.submit(request, jobs, api.prompts, quiet=api.no_log)
        async with watched(request, ticket):
            found = await ticket.completions()
        body = await in_thread(request, lambda: to_text(answer(api, tokenizer, jobs, found)))
        return Response(body, media_type="application/json", headers={SEED: str(seed)})

    return [Route("/api", generate, methods=["PUT"])]


def to_text(body: dict[str, Any]) -> str:
    """Return an answer as Megatron-LM's server writes it."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
