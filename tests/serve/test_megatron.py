"""`PUT /api` over a real model: the form of an answer, seeds, limits, and Megatron-LM's command-line client."""

import math

import pytest
from hypothesis import given, settings

from dtgpt.inference.prompts import special_ids
from dtgpt.serve.app import make_app
from dtgpt.serve.megatron import make_jobs
from dtgpt.serve.megatron_request import read_request
from tests.serve.test_megatron_request import REQUESTS
from tests.support.scripted_engine import ScriptedEngine
from tests.support.server import bytes_tokenizer as tokenizer
from tests.support.server import client, served, served_script, tiny_model


@pytest.fixture(scope="module")
def service():
    with served(tiny_model()) as service:
        yield service


@pytest.fixture(scope="module")
def api(service):
    with client(make_app(service)) as http:
        yield lambda **keys: http.put("/api", json=keys)


def test_an_answer_is_written_as_megatron_writes_it():
    def script(request, choice):
        return list("né\n".encode())

    model = tiny_model()
    engine = ScriptedEngine(script)
    with served_script(engine, model.config, tokenizer()) as service, client(make_app(service)) as http:
        text = http.put("/api", json={"prompts": ["x"], "tokens_to_generate": 4}).text
    assert text == ('{"logprobs":null,"segments":[["x","n","\\ufffd","\\ufffd","\\n"]],"text":["xn\\u00e9\\n"]}\n')


def test_the_seed_in_the_header_gives_the_same_answer_again(api):
    asked = {"prompts": ["one", "two"], "tokens_to_generate": 20}
    first, other = api(**asked), api(**asked)
    seed = first.headers["x-seed"]
    assert first.text != other.text and seed != other.headers["x-seed"]
    again = api(**asked, random_seed=int(seed))
    assert again.text == first.text and again.headers["x-seed"] == seed


def test_an_answer_does_not_depend_on_the_other_prompts_of_a_batch(api):
    asked = {"tokens_to_generate": 12, "random_seed": 5}
    both = api(prompts=["one", "a longer one"], **asked).json()
    assert api(prompts=["one"], **asked).json()["text"] == both["text"][:1]
    assert [len(own) for own in both["segments"]] == [15, 24]


def test_scores_of_a_prompt_are_those_before_its_continuation(api):
    scored = api(prompts=["some text", "x"], tokens_to_generate=0, logprobs=True).json()
    assert [len(own) for own in scored["logprobs"]] == [8, 0] and scored["text"] == ["some text", "x"]
    assert all(math.isfinite(x) and x < 0 for x in scored["logprobs"][0])
    continued = api(prompts=["some text"], tokens_to_generate=5, logprobs=True, top_k=1).json()
    assert continued["logprobs"][0][:8] == pytest.approx(scored["logprobs"][0], abs=1e-5)
    assert len(continued["logprobs"][0]) == 13


def test_beams_are_scored_and_end_with_their_last_token(api):
    found = api(prompts=["ab"], tokens_to_generate=5, beam_width=3, logprobs=True, top_k=7).json()
    assert sorted(found) == ["scores", "segments", "text"]
    assert found["scores"] == sorted(found["scores"], reverse=True) and len(found["text"]) == 3
    longest = api(prompts=["ab"], tokens_to_generate=500, beam_width=1).json()  # to the last position
    assert len(longest["segments"][0]) <= 64
    assert api(prompts=["ab"], tokens_to_generate=3, beam_width=1, stop_token=10**9).status_code == 200


def test_a_stop_token_counts_for_beams_alone_and_replaces_the_end_of_text():
    def stops(**keys):
        asked = read_request({"prompts": ["ab"], "tokens_to_generate": 4, **keys})
        (job,) = make_jobs(asked, tokenizer(), tiny_model().config, seed=0)
        return job.options.end_ids(special_ids(tokenizer(), [256]))

    assert stops() == stops(beam_width=2) == stops(stop_token=7) == [256]
    assert stops(beam_width=2, stop_token=7) == [7]
    assert stops(beam_width=2, stop_token=-1) == stops(beam_width=2, stop_token=257) == []  # which never come


@pytest.mark.parametrize("keys, words", [
    ({"beam_width": 9}, "9 sequences"),  # more than there are slots
    ({"beam_width": 129}, "beam_width=129 is too large"),
    ({"beam_width": 2, "length_penalty": 1e9}, "length_penalty=1000000000.0 is not valid"),
    ({"tokens_to_generate": 63}, "Length of prompt + tokens_to_generate longer than allowed"),
    ({"beam_width": 2, "tokens_to_generate": 0, "logprobs": True}, "context length + tokens_to_generate too large"),
    ({"random_seed": 2**64}, "random_seed is too large"),
])  # fmt: skip
def test_what_the_model_cannot_do_is_refused_in_one_sentence(api, keys, words):
    response = api(prompts=["ab"], **{"tokens_to_generate": 4, **keys})
    assert response.status_code == 400 and list(response.json()) == ["message"]
    assert words in response.json()["message"]


@pytest.mark.slow(1)
@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_no_request_fails_inside(api, body):
    response = api(**{"tokens_to_generate": 3, **body})
    assert response.status_code in (200, 400), response.text
    found = response.json()
    assert found.keys() in ({"message"}, {"logprobs", "segments", "text"}, {"scores", "segments", "text"})
