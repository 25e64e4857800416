"""The routes about the tokenizer, as vLLM has them: with these, lm_eval needs no tokenizer of its own."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dtgpt.data.library_tokenizers.chat_template import template_of
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.serve.body import read_json
from dtgpt.serve.openai_keys import SWITCH, TEXT, Kind, read_kind
from dtgpt.serve.openai_request import check_model
from dtgpt.serve.problems import HttpProblem
from dtgpt.serve.service import Service, in_thread
from dtgpt.util.errors import shown

Object = dict[str, Any]  # of JSON
IDS = Kind(list, "is not a list; send ids, such as [0, 1]")


def routes(service: Service) -> list[Route]:
    """Return the routes `/tokenize`, `/detokenize` and `/tokenizer_info`, on a service."""

    def about(make: Callable[[Object, Service], Object]) -> Callable:
        async def route(request: Request) -> Response:
            body = await read_json(request, service.limits)
            check_model(body.get("model"), service.model_id)
            return await in_thread(request, lambda: JSONResponse(make(body, service)))

        return route

    async def info(request: Request) -> Response:
        return JSONResponse(describe(service.tokenizer, service.config.seq_length))

    return [
        Route("/tokenize", about(tokenize), methods=["POST"]),
        Route("/detokenize", about(detokenize), methods=["POST"]),
        Route("/tokenizer_info", info, methods=["GET"]),
    ]


def tokenize(body: Object, service: Service) -> Object:
    """Return the ids of a text, in which names of special tokens stand for these: lm_eval asks for the id of the end of
    text by its name. Raise HttpProblem for a wrong value."""
    text, tokenizer = read_kind("prompt", body.get("prompt"), TEXT), service.tokenizer
    ids = tokenizer.encode_prompt(text) if _switch(body, "add_special_tokens", True) else tokenizer.encode_bare(text)
    found = {"count": len(ids), "max_model_len": service.config.seq_length, "tokens": ids, "token_strs": None}
    if _switch(body, "return_token_strs", False):
        texts = {i: tokenizer.decode([i]) for i in set(ids)}
        found["token_strs"] = [texts[i] for i in ids]
    return found


def detokenize(body: Object, service: Service) -> Object:
    """Return the text of ids, special tokens by their names. Raise HttpProblem for a wrong value."""
    ids, most = read_kind("tokens", body.get("tokens"), IDS), service.tokenizer.vocab_size - 1
    wrong = [i for i in ids if type(i) is not int or not 0 <= i <= most]
    if wrong:
        raise HttpProblem(400, f"{shown(wrong[0])} is not a token of this model; use ids from 0 to {most}", "tokens")
    return {"prompt": service.tokenizer.decode(ids)}


def describe(tokenizer: Tokenizer, positions: int) -> Object:
    """Return what Hugging Face's `tokenizer_config.json` has: names of special tokens, null where there is none.
    `positions`: of the model."""
    template = template_of(tokenizer)
    begin = tokenizer.opening if tokenizer.begin_of_text is None else tokenizer.begin_of_text
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": positions,
        "bos_token": _name(tokenizer, begin),
        "eos_token": _name(tokenizer, tokenizer.end_of_text),
        "pad_token": None,
        "chat_template": None if template is None else template.source,
    }


def _name(tokenizer: Tokenizer, i: int | None) -> str | None:
    return None if i is None else tokenizer.decode([i])


def _switch(body: Object, key: str, default: bool) -> bool:
    return read_kind(key, default if body.get(key) is None else body[key], SWITCH)
