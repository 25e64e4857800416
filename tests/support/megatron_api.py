"""Megatron-LM's `PUT /api` of 2023 on the engine: what a request's keys ask of it, and the answer of its events.

Differences on purpose: every prompt of a batch gets `tokens_to_generate` tokens (not the shorter ones more), beams are
not padded, padded columns of the vocabulary do not count, and ids with a meaning are the tokenizer's, not GPT-2's.
"""

from dataclasses import dataclass, fields
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.beam import Beams
from dtgpt.inference.engine import Engine
from dtgpt.inference.prompts import special_ids
from dtgpt.inference.request import Event, Request
from dtgpt.inference.sampling import Sampling
from dtgpt.inference.text import segments
from tests.support.engines import drain


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """The keys of a request, whose values are taken as valid. Others, such as `no_log`, do not change its answer."""

    prompts: list[str]
    tokens_to_generate: int = 64  # 0: score the prompts
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int | None = None
    beam_width: int | None = None
    stop_token: int | None = None  # of beams alone; default: the end of text
    length_penalty: float = 1.0

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "ApiRequest":
        """Return the request of a JSON object; unknown keys are ignored."""
        return cls(**{field.name: body[field.name] for field in fields(cls) if field.name in body})


def engine_requests(api: ApiRequest, tokenizer: Tokenizer, vocab_size: int, seed: int) -> list[Request]:
    """Return what the engine is asked for, one request a prompt. `seed`: where the request names none."""
    special = special_ids(tokenizer)
    begin = [special.end_of_text] if api.add_BOS and special.end_of_text is not None else []
    sampling = _sampling(api, vocab_size, seed)
    beams = Beams(width=api.beam_width, length_penalty=api.length_penalty, ended_bound=True) if api.beam_width else None
    return [
        Request(
            ids=[*begin, *tokenizer.encode(prompt)], sampling=sampling, special=special, prompt_index=index,
            choices=api.beam_width or 1, score_prompt=api.logprobs and not beams, beams=beams,
        )
        for index, prompt in enumerate(api.prompts)
    ]  # fmt: skip


def _sampling(api: ApiRequest, vocab_size: int, seed: int) -> Sampling:
    """Return how each sequence goes on. Of both rules for ends of lines, that for two of them counts."""
    shared: dict[str, Any] = {
        "max_new_tokens": api.tokens_to_generate, "prevent_newline_after_colon": api.prevent_newline_after_colon,
    }  # fmt: skip
    if api.beam_width:  # searches: no filter, seed or end of line counts
        if api.stop_token is None:
            return Sampling(**shared)
        stops = (api.stop_token,) if 0 <= api.stop_token < vocab_size else ()  # others never come
        return Sampling(ends=False, stop_token_ids=stops, **shared)
    return Sampling(
        temperature=api.temperature, top_k=api.top_k, top_p=api.top_p, top_p_decay=api.top_p_decay,
        top_p_bound=api.top_p_bound, seed=seed if api.random_seed is None else api.random_seed,
        ends=not (api.stop_on_eol or api.stop_on_double_eol), stop_on_double_eol=api.stop_on_double_eol,
        stop_on_eol=api.stop_on_eol and not api.stop_on_double_eol, **shared,
    )  # fmt: skip


def answer(api: ApiRequest, tokenizer: Tokenizer, prompts: list[list[int]], events: list[list[Event]]) -> dict:
    """Return the body of the answer from the ids and from all the events of each prompt."""
    if api.beam_width:
        hypotheses = sorted(events[0], key=lambda event: event.choice)
        found = [[*prompts[0], *(event.ids[:-1] if event.finish == "stop" else event.ids)] for event in hypotheses]
        return {"scores": [event.score for event in hypotheses], **_texts(tokenizer, found)}
    sequences, scores = [], []
    for ids, own in zip(prompts, events, strict=True):
        own = sorted(own, key=lambda event: event.choice)  # stable: the scores of the prompt, then the continuation
        sequences.append([*ids, *(i for event in own if event.choice == 0 for i in event.ids)])
        scores.append([x for event in own for x in event.logprobs])
    return {"logprobs": scores if api.logprobs else None, **_texts(tokenizer, sequences)}


def _texts(tokenizer: Tokenizer, sequences: list[list[int]]) -> dict[str, list]:
    return {
        "segments": [segments(tokenizer, ids) for ids in sequences],
        "text": [tokenizer.decode(ids) for ids in sequences],
    }


def serve(engine: Engine, tokenizer: Tokenizer, vocab_size: int, body: dict[str, Any], seed: int = 0) -> dict:
    """Return the answer to one request, which the engine works on alone."""
    api = ApiRequest.from_json(body)
    requests = engine_requests(api, tokenizer, vocab_size, seed)
    handles = [engine.submit(request) for request in requests]
    events = drain(engine)
    own = [[event for event in events if event.request == handle] for handle in handles]
    return answer(api, tokenizer, [request.ids for request in requests], own)
