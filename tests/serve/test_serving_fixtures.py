"""Answers of Megatron-LM's text generation server of 2023, given again by the engine and by the server.

The cases are requests, with the answers: see `serving_cases`; tests/ops/test_sampling.py has those of filters. Those of
`behaviour` go to a model by rules each, those of `validation` to one model, over HTTP. What dtgpt does otherwise on
purpose is taken out of a recorded answer before it is compared: tokens that a shorter prompt of a batch got beyond the
number asked for, the padding of beams, and the form and status of refusals. Where its types of numbers are others, the
table of rules in `tests.support.megatron_rules`, which every recorded refusal must follow, says what is expected.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.beams.search import BeamSearch
from dtgpt.inference.library.jobs import run_jobs, segments
from dtgpt.inference.prompts import special_ids
from dtgpt.inference.request import PromptJob
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.sample import likeliest
from dtgpt.serve.app import make_app
from dtgpt.serve.megatron import answer, make_jobs
from dtgpt.serve.megatron_request import read_request
from tests.support.engines import engine_of
from tests.support.megatron_rules import FAILS, MEGATRON, OURS, length_refusal, refusal
from tests.support.model_by_rules import model_by_rules
from tests.support.server import client, served
from tests.support.serving import serving_cases
from tests.support.vocabularies import gpt2_files

WORLD = [{"logits": {"995": 9}}]  # the rules of the model of `validation`
INVALID, LAX = object(), object()
TOLERANCE = 1e-5  # absolute and relative, of log-probabilities and scores
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return from_files(*gpt2_files(tmp_path_factory.mktemp("gpt2")))


def named(case: dict) -> str:
    return case.get("note", json.dumps(case.get("request", case)))


@pytest.fixture(scope="module")
def world():
    return model_by_rules(WORLD)


@pytest.fixture(scope="module")
def app_client(world, tokenizer):
    with served(world, tokenizer) as service, client(make_app(service)) as http:
        yield http


@pytest.mark.slow(6)
@pytest.mark.parametrize("case", serving_cases("validation"), ids=named)
def test_the_server_answers_as_megatrons_did(case, app_client, world, tokenizer):
    response = send(app_client, case)
    request = parsed(case)
    if request is INVALID or case["status"] in (405, 415):  # of the framework: form, sentence and status are the same
        assert (response.status_code, response.json()) == (case["status"], case["body"])
        return
    if request is LAX:
        assert_refused(response)
        return
    theirs, ours = (sentence_of(request, types, world, tokenizer) for types in (MEGATRON, OURS))
    if isinstance(case["body"], str):
        assert theirs == case["body"]
    elif case["status"] == 200:
        assert theirs is None
    if ours is not None:
        assert_refused(response, None if ours == FAILS else ours)
    elif case["status"] == 500 and response.status_code == 400:  # for a reason that Megatron-LM does not tell
        assert_refused(response)
    else:
        assert response.status_code == 200, response.text
        if theirs is None and case["status"] == 200:
            assert_answers(request, response.json(), case["body"], world, tokenizer)
        else:
            assert len(response.json()["text"]) == len(request["prompts"])


def send(http, case: dict):
    """The answer to a case, sent as it was recorded."""
    kind = case.get("content_type", "text/plain" if case["status"] == 415 else "application/json")
    method = case.get("method", "put").upper()
    return http.request(method, case.get("path", "/api"), content=raw(case), headers={"Content-Type": kind})


def raw(case: dict) -> str:
    return case.get("raw", json.dumps(case.get("request")))


def parsed(case: dict):
    """The JSON value of a case; INVALID where it is not JSON, LAX where Python's reader alone takes it."""

    def without_repetition(pairs: list) -> dict:
        if len(dict(pairs)) < len(pairs):
            raise LookupError
        return dict(pairs)

    def constant(name: str):
        raise LookupError

    try:
        return json.loads(raw(case), object_pairs_hook=without_repetition, parse_constant=constant)
    except LookupError:
        return LAX
    except ValueError:
        return INVALID


def sentence_of(request, types, model: Decoder, tokenizer: Tokenizer) -> str | None:
    """Why a request is refused, None where it is not."""
    if not isinstance(request, dict):
        fails = types is MEGATRON and (not isinstance(request, str | list) or "prompts" in request)
        return FAILS if fails else "prompts argument required"
    sentence = refusal(request, types)
    if sentence is None:
        sentence = length_refusal(request, lengths_of(request, tokenizer), model.config.seq_length)
    return sentence


def lengths_of(request: dict, tokenizer: Tokenizer) -> list[int]:
    """The number of ids of each prompt."""
    return [len(tokenizer.encode(prompt)) + request.get("add_BOS", False) for prompt in request["prompts"]]


def assert_refused(response, sentence: str | None = None) -> None:
    """`sentence`: that it must have; None: any."""
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["message"] and body["message"]
    assert sentence is None or body["message"] == sentence


def assert_answers(request: dict, ours: dict, recorded: dict, model: Decoder, tokenizer: Tokenizer) -> None:
    """Compare the answer to an accepted request with what was recorded of it."""
    greedy = request.get("top_k") == 1 or not request.get("tokens_to_generate", 64)
    if "segments_length" in recorded:
        lengths = lengths_of(request, tokenizer)
        surplus = max(lengths) - lengths[0] if request.get("tokens_to_generate", 64) else 0
        longest, found = recorded["segments_length"] - surplus, len(ours["segments"][0])
        assert found == longest if greedy and "beam_width" not in request else lengths[0] < found <= longest
    elif "scores" in recorded:
        assert_same_beams(request, model, tokenizer, ours, recorded)
    elif greedy:
        assert_same_sequences(request, ours, recorded, tokenizer)
    else:  # drawn
        assert ours.keys() == recorded.keys() and len(ours["text"]) == len(recorded["text"])
        assert all(prompt in text for prompt, text in zip(request["prompts"], ours["text"], strict=True))


@pytest.mark.slow(1)
@pytest.mark.parametrize("case", serving_cases("behaviour"), ids=named)
def test_the_engine_answers_as_megatron_did(case, tokenizer):
    request, model = case["request"], model_by_rules(case["rules"])
    jobs = jobs_of(request, model, tokenizer)
    with engine_of(model, slots=max(8, request.get("beam_width", 1))) as engine:
        engine.tokenizer, engine.special = tokenizer, special_ids(tokenizer, [tokenizer.end_of_text])
        found = list(run_jobs(engine, jobs))
    ours = answer(read_request(request), tokenizer, jobs, found)
    if "scores" in case["body"]:
        assert_same_beams(request, model, tokenizer, ours, case["body"])
    else:
        assert_same_sequences(request, ours, case["body"], tokenizer)


def assert_same_sequences(request: dict, ours: dict, body: dict, tokenizer: Tokenizer) -> None:
    asked = request.get("tokens_to_generate", 64)
    lengths = lengths_of(request, tokenizer)
    recorded = without_surplus(body, ours, lengths, asked)
    if asked and request.get("prevent_newline_after_colon"):
        leave_out_forced_colons(recorded, ours, lengths)
    assert_same(ours, recorded)


def jobs_of(request: dict, model: Decoder, tokenizer: Tokenizer) -> list[PromptJob]:
    return make_jobs(read_request(request), tokenizer, model.config, seed=0)


def assert_same(ours: dict, recorded: dict) -> None:
    assert ours.keys() == recorded.keys()
    assert ours["segments"] == recorded["segments"]
    assert ours["text"] == recorded["text"]
    for row, theirs in zip(numbers(ours), numbers(recorded), strict=True):
        assert row == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)


def numbers(answer: dict) -> list[list[float]]:
    """The scores of beams, or the log-probabilities of each sequence, if there are any."""
    return [answer["scores"]] if "scores" in answer else answer["logprobs"] or []


def assert_same_beams(request: dict, model: Decoder, tokenizer: Tokenizer, ours: dict, recorded: dict) -> None:
    """Compare answers of beams. Megatron sorts all candidates by an unstable sort: of those with equal sums it takes
    any. The engine must find what the search finds; where that is not what was recorded, a search that prefers the
    recorded sequences among equals must find those."""
    (job,) = jobs_of(request, model, tokenizer)
    asked = replace(job, special=special_ids(tokenizer, [tokenizer.end_of_text]))
    assert_same(ours, search(BeamSearch, asked, model, tokenizer, recorded))
    padded = pad_beams(ours, asked)
    if padded["segments"] != recorded["segments"]:
        padded = pad_beams(search(Guided, asked, model, tokenizer, recorded), asked)
    assert_same(padded, recorded)


def pad_beams(answer: dict, asked: PromptJob) -> dict:
    """An answer of beams as Megatron gives it, each filled up with ends of text."""
    length = len(asked.ids) + asked.options.max_new_tokens
    missing = [length - len(own) for own in answer["segments"]]
    return answer | {
        "segments": [own + [END] * n for own, n in zip(answer["segments"], missing, strict=True)],
        "text": [own + END * n for own, n in zip(answer["text"], missing, strict=True)],
    }


class Guided(BeamSearch):
    """A search that takes the candidate that continues a wanted sequence, given in segments, where sums tie."""

    wanted: list[list[str]]
    decode: Callable[[list[int]], list[str]]

    def _rank(self, total: float, row: int, token: int) -> tuple[float, int, int]:
        found = self.decode([*self._open[row].ids, token])
        places = [place for place, own in enumerate(self.wanted) if own[: len(found)] == found]
        share = 1 - places[0] / 2 / len(self.wanted) if places else 0.0  # the first of them before the others
        return -total - share * TOLERANCE * max(1, abs(total)), row, token


def search(kind: type[BeamSearch], asked: PromptJob, model: Decoder, tokenizer: Tokenizer, recorded: dict) -> dict:
    """The answer of a search on this host, over log-probabilities of whole sequences. Its candidates are the likeliest
    tokens, and all tokens as likely as the last one of these that are recorded."""
    assert asked.options.search is not None
    beams = kind(asked.options.search, asked.options.max_new_tokens, asked.options.end_ids(asked.special))
    if isinstance(beams, Guided):
        beams.wanted = [own[len(asked.ids) :] for own in recorded["segments"]]
        beams.decode = partial(segments, tokenizer)
    known = {name for own in recorded["segments"] for name in own}
    rows = [asked.ids]
    while rows:
        with torch.no_grad():
            logits = model(torch.tensor(rows))[:, -1, : model.config.vocab_size]
        if asked.options.prevent_newline_after_colon:
            logits[[ids[-1] == asked.special.colon for ids in rows], asked.special.newline] = -math.inf
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float64).float()
        candidates = []
        for row in logprobs:
            top = likeliest(row[None], beams.alternatives)[0].tolist()
            tied = (row == row[top[-1]]).nonzero()[:, 0].tolist() if isinstance(beams, Guided) else []
            tied = [i for i in tied if i not in top and tokenizer.decode([i]) in known]
            candidates.append([(i, row[i].item()) for i in [*top, *tied]])
        rows = [[*rows[source], token] for source, token in beams.advance(candidates)]
    found = [[*asked.ids, *(own.ids[:-1] if own.ended else own.ids)] for own in beams.hypotheses]
    texts = {"segments": [segments(tokenizer, ids) for ids in found], "text": [tokenizer.decode(ids) for ids in found]}
    return texts | {"scores": [own.score for own in beams.hypotheses]}


def without_surplus(body: dict, ours: dict, lengths: list[int], asked: int) -> dict:
    """A recorded answer with at most `asked` new tokens for each prompt. A text that is longer than that begins with
    `ours`, but for a character that is cut there."""
    cut = {name: list(body[name]) for name in ("text", "segments", "logprobs") if body[name] is not None}
    for row, length in enumerate(lengths):
        end = length + asked
        if len(body["segments"][row]) > end and body["text"][row].startswith(ours["text"][row].rstrip("\ufffd")):
            cut["text"][row] = ours["text"][row]
        cut["segments"][row] = body["segments"][row][:end]
        if body["logprobs"] is not None:
            cut["logprobs"][row] = body["logprobs"][row][: end - 1]
    return body | cut


def leave_out_forced_colons(recorded: dict, ours: dict, lengths: list[int]) -> None:
    """Megatron applies the rule of the colon to those tokens of a prompt that are behind the shortest prompt's end, in
    a batch: what follows a colon there has another log-probability than in the prompt alone."""
    if recorded["logprobs"] is None:
        return
    for theirs, own, names, length in zip(
        recorded["logprobs"], ours["logprobs"], recorded["segments"], lengths, strict=True
    ):
        for at in range(min(lengths) - 1, length - 1):
            if names[at] == ":":
                theirs[at] = own[at]
