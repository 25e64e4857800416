"""OpenAI's completions, chat completions, responses and models."""

from functools import cache, partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.serve.body import read_json
from dtgpt.serve.openai_answer import ENCODER, CompletionAnswer, CompletionStream
from dtgpt.serve.openai_chat import ChatAnswer, read_chat_request
from dtgpt.serve.openai_logprobs import TokenNames
from dtgpt.serve.openai_request import check_model, read_request
from dtgpt.serve.openai_responses import ResponseAnswer, read_response_request
from dtgpt.serve.problems import HttpProblem, error_object
from dtgpt.serve.service import LARGE, SEED, SIZE, Service, in_thread, in_thread_if_long, watched
from dtgpt.serve.ticket import ClientGone, Ticket


def routes(service: Service) -> list[Route]:
    """Return the routes of OpenAI's API."""
    tokenizer = service.model.known_tokenizer
    names = TokenNames(tokenizer)

    @cache
    def prompts(large: bool) -> ChatPrompts:  # each with a process: a long chat does not hold short ones up
        return ChatPrompts(service.tokenizer, service.config, service.model.special.ends)

    async def create(request: Request) -> Response:
        body = await read_json(request, service.limits)
        model, name = service.model, service.model_id
        asked = await in_thread_if_long(request, read_request, body, model, name, service.limits)
        return await respond(request, CompletionAnswer(asked, service.model_id, tokenizer, names))

    async def create_chat(request: Request) -> Response:
        body = await read_json(request, service.limits)
        own = partial(prompts, request.scope[SIZE] >= LARGE)
        asked = await in_thread(request, read_chat_request, body, service, own)  # which renders a template
        return await respond(request, ChatAnswer(asked, service.model_id, tokenizer, names))

    async def create_response(request: Request) -> Response:
        body = await read_json(request, service.limits)
        own = partial(prompts, request.scope[SIZE] >= LARGE)
        asked = await in_thread(request, read_response_request, body, service, own)
        return await respond(request, ResponseAnswer(asked, service.model_id, tokenizer, names))

    async def respond(request: Request, answer: CompletionAnswer) -> Response:
        asked = answer.asked
        headers = {SEED: str(asked.seed), "X-Request-Id": answer.id, "Cache-Control": "no-store"}
        ticket = service.submit(request, asked.jobs, [prompt.text or prompt.ids for prompt in asked.prompts])
        if asked.stream:
            return EventStream(request, ticket, answer.stream(), headers)
        async with watched(request, ticket):
            found = await ticket.completions()
        request.scope[SIZE] = answer.tokens(found)
        return await in_thread_if_long(request, lambda: json_answer(answer.whole(found), headers))

    async def models(request: Request) -> Response:
        return json_answer({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        check_model(request.path_params["model"], service.model_id)
        return json_answer(_model(service))

    return [
        Route("/v1/completions", create, methods=["POST"]),
        Route("/completions", create, methods=["POST"]),
        Route("/v1/chat/completions", create_chat, methods=["POST"]),
        Route("/chat/completions", create_chat, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/responses", create_response, methods=["POST"]),
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/models/{model:path}", model),
    ]


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "dtgpt",
        "max_model_len": service.config.seq_length,
    }


def json_answer(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Return an answer in JSON, all of it ASCII."""
    return Response(ENCODER.encode(content), headers=headers, media_type="application/json")


class EventStream(Response):
    """An answer that is sent as it is generated. It begins with the first round, so that what fails before has the
    status of an error."""

    def __init__(self, request: Request, ticket: Ticket, stream: CompletionStream, headers: dict[str, str]):
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._request, self._ticket, self._stream = request, ticket, stream
        request.scope[SIZE] = stream.opening  # tokens of the prompt that it begins with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with watched(self._request, self._ticket) as ticket:
                async for updates in ticket.rounds():
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    events = await in_thread_if_long(self._request, self._stream.events, updates)
                    if events:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            last = self._stream.end()
        except HttpProblem as problem:
            if not begun:
                raise
            last = b"" if isinstance(problem, ClientGone) else error_event(problem)
        await send({"type": "http.response.body", "body": last})


def error_event(problem: HttpProblem) -> bytes:
    """Return the event that ends a stream which fails, for which OpenAI's client raises an error."""
    return b"data: " + ENCODER.encode(error_object(problem)).encode() + b"\n\n"
