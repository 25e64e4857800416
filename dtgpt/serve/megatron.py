"""The route of Megatron-LM's text generation server, `PUT /api`: from a request to jobs for the engine, and from their
sequences to the answer.

Differences on purpose: every prompt of a batch gets `tokens_to_generate` tokens (not the shorter ones more), beams are
not padded, logits of the vocabulary's padding do not count, draws belong to (seed, prompt's index, position), and
the ids that rules look for are the tokenizer's, not GPT-2's.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import MOST_SEQUENCES
from dtgpt.inference.beams.search import Beams
from dtgpt.inference.library.jobs import segments
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import encode
from dtgpt.inference.request import Completion, PromptJob
from dtgpt.models.config import ModelConfig
from dtgpt.posttrain.chats.length import TooLong, check_length
from dtgpt.serve.body import read_json
from dtgpt.serve.megatron_request import OPTION_KEYS, ApiRequest, read_request
from dtgpt.serve.openai_logprobs import LOWEST_LOGPROB
from dtgpt.serve.service import SEED, Service, draw_seed, in_thread, watched
from dtgpt.util.errors import UserError, shown

MOST_TOKENS = 12000  # of a request, prompts and new ones, as Megatron-LM's --max-tokens-to-oom


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


def make_jobs(api: ApiRequest, tokenizer: Tokenizer, config: ModelConfig, seed: int) -> list[PromptJob]:
    """Return a job for each prompt. `seed`: of the draws. Raise UserError where the prompts are too long, with
    Megatron-LM's sentence, or have no ids."""
    try:
        prompts = _encode(api, tokenizer, config)
    except TooLong:
        raise UserError(_too_long(api)) from None
    new_tokens = _new_tokens(api, prompts, config)
    if api.beam_width is not None:
        (ids,) = prompts
        return [_search(api, ids, new_tokens, api.beam_width, config)]
    given = {name: getattr(api, key) for name, key in OPTION_KEYS.items()}
    given |= {"max_new_tokens": new_tokens, "seed": seed, "prompt_logprobs": api.logprobs}
    given["stop_on_eol"] = api.stop_on_eol and not api.stop_on_double_eol
    options = Options(**given)
    return [PromptJob(ids, options, index) for index, ids in enumerate(prompts)]


def _encode(api: ApiRequest, tokenizer: Tokenizer, config: ModelConfig) -> list[list[int]]:
    """Return the ids of the prompts, in which names of special tokens are text as any other. Raise TooLong."""
    opening, found = list[int](), list[list[int]]()
    if api.add_BOS:
        if tokenizer.end_of_text is None:
            raise UserError(
                f"the tokenizer {tokenizer.name} has no end of text to put before a prompt; leave add_BOS out"
            )
        opening = [tokenizer.end_of_text]
    for prompt in api.prompts:
        check_length(prompt, tokenizer, config)
        own = encode(prompt, tokenizer, config, split_special_tokens=True) if prompt or not opening else []
        found.append([*opening, *own])
        if len(found[-1]) > config.seq_length:  # before the others are read
            raise TooLong
    return found


def _new_tokens(api: ApiRequest, prompts: list[list[int]], config: ModelConfig) -> int:
    """Return the largest number of tokens to add to each prompt. Raise UserError where there is no place for them."""
    longest, positions = max(map(len, prompts)), config.seq_length
    if api.beam_width is not None:  # which ends at the last position
        new_tokens = min(api.tokens_to_generate, positions - longest)
        if new_tokens <= 0:
            raise UserError(_too_long(api))
        return new_tokens
    whole = longest + api.tokens_to_generate
    if whole > positions:
        raise UserError(_too_long(api))
    most = max(MOST_TOKENS, positions)  # so that a single prompt may use all positions of a model
    if whole * len(prompts) > most:
        raise UserError(f"Too many tokens.  {whole * len(prompts)} is greater than {most}")
    return api.tokens_to_generate


def _too_long(api: ApiRequest) -> str:
    if api.beam_width is not None:
        return "context length + tokens_to_generate too large"
    return "Length of prompt + tokens_to_generate longer than allowed"


def _search(api: ApiRequest, ids: list[int], new_tokens: int, width: int, config: ModelConfig) -> PromptJob:
    """Return a beam search, in which no filter, seed or end of a line counts."""
    most = min(MOST_SEQUENCES, config.vocab_size // 2)
    if width > most:
        raise UserError(f"beam_width={shown(width)} is too large; use 1 to {most}")
    stops: dict[str, Any] = {}
    if api.stop_token is not None:  # a token that the model does not have never comes
        stops = {"ends": False, "stop_token_ids": (api.stop_token,) * (0 <= api.stop_token < config.vocab_size)}
    options = Options(
        max_new_tokens=new_tokens,
        num_return_sequences=width,
        prevent_newline_after_colon=api.prevent_newline_after_colon,
        search=Beams(width=width, length_penalty=api.length_penalty, ended_bound=True),
        **stops,
    )
    return PromptJob(ids, options)


def answer(
    api: ApiRequest, tokenizer: Tokenizer, jobs: Sequence[PromptJob], found: Sequence[list[Completion]]
) -> dict[str, Any]:
    """Return the body of the answer. `found`: the sequences of each job."""
    if api.beam_width is not None:
        return _beams(tokenizer, jobs[0].ids, found[0])
    sequences, scores = [], []
    for job, (completion,) in zip(jobs, found, strict=True):
        sequences.append([*job.ids, *completion.ids])
        scores.append([max(LOWEST_LOGPROB, x) for x in (*(completion.prompt_logprobs or []), *completion.logprobs)])
    return {"logprobs": scores if api.logprobs else None, **_texts(tokenizer, sequences)}


def _beams(tokenizer: Tokenizer, prompt: list[int], hypotheses: list[Completion]) -> dict[str, Any]:
    """Return the hypotheses without the tokens that ended them. Where rules leave few tokens, fewer are found than
    asked for."""
    found = [one for one in hypotheses if one.score is not None and one.score > -math.inf]
    ids = [[*prompt, *(one.ids[:-1] if one.finish_reason == "stop" else one.ids)] for one in found]
    return {"scores": [one.score for one in found], **_texts(tokenizer, ids)}


def _texts(tokenizer: Tokenizer, sequences: list[list[int]]) -> dict[str, Any]:
    return {
        "segments": [segments(tokenizer, ids) for ids in sequences],
        "text": [tokenizer.decode(ids) for ids in sequences],
    }
