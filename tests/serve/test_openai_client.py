"""OpenAI's own client against a live server, over a model of random weights and the tokenizer of bytes."""

import threading
import time
from itertools import chain

import openai
import pytest
import torch

from dtgpt.models.gpt2 import GPT2Config
from dtgpt.serve.limits import RequestLimits
from tests.support.scripted_engine import ScriptedEngine
from tests.support.server import bytes_tokenizer, live_server, served, served_script, tiny_model

pytestmark = pytest.mark.slow(4)

LONG = {"prompt": "x", "max_tokens": 1000, "logit_bias": {"256": -100}}


def make_model():
    """A model whose text is mostly ASCII, and differs from place to place."""
    model = tiny_model(seq_length=1024, init_std=0.3)
    with torch.no_grad():
        model.embedding.wte.weight[128:256] *= 0.1
    return model


@pytest.fixture(scope="module")
def service():
    with served(make_model(), slots=4) as service:
        yield service


@pytest.fixture(scope="module")
def address(service):
    with live_server(service) as address:
        yield address


def client_of(address: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **options})


@pytest.fixture(scope="module")
def client(address):
    with client_of(address) as client:
        yield client


def create(client, prompt="Hello", **options):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 12, "seed": 1, **options})


def texts(answer):
    return [choice.text for choice in answer.choices]


def test_an_answer_has_the_form_of_openais(client):
    answer = create(client)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "tiny"
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert 0 < len(choice.text) <= 12
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17,
    }  # fmt: skip
    assert create(client).choices[0].text == choice.text != create(client, seed=2).choices[0].text


def test_a_seed_that_the_server_drew_gives_the_text_again(client):
    raw = client.completions.with_raw_response.create(model="tiny", prompt="Hello", max_tokens=12)
    seed, answer = int(raw.headers["x-seed"]), raw.parse()
    assert texts(create(client, seed=seed)) == texts(answer)
    assert raw.headers["x-request-id"] == answer.id == answer._request_id
    other = client.completions.with_raw_response.create(model="tiny", prompt="Hello", max_tokens=12)
    assert int(other.headers["x-seed"]) != seed


def test_lists_and_ids_as_prompts(client):
    greedy = {"temperature": 0, "max_tokens": 8}
    alone = [texts(create(client, prompt, **greedy))[0] for prompt in ("Hello", "other")]
    assert texts(create(client, ["Hello", "other"], **greedy)) == alone
    assert texts(create(client, list(b"Hello"), **greedy)) == alone[:1]
    assert texts(create(client, [list(b"Hello"), list(b"other")], **greedy)) == alone
    begun = create(client, None, **greedy, echo=True)  # null, as a missing prompt, begins a document
    assert texts(begun)[0].startswith("<|endoftext|>") and begun.usage.prompt_tokens == 1
    named = create(client, "<|endoftext|>", **greedy, echo=True)
    assert texts(named) == texts(begun) and named.usage.prompt_tokens == 1


def test_n_and_best_of(client):
    several = create(client, ["Hello", "other"], n=3)
    assert [choice.index for choice in several.choices] == list(range(6))
    assert len(set(texts(several))) == 6
    assert texts(create(client, n=2)) == texts(several)[:2]
    assert several.usage.prompt_tokens == 10 and several.usage.completion_tokens == 6 * 12
    all_of_them = create(client, n=4, logprobs=0).choices
    ranked = sorted(all_of_them, key=lambda choice: -sum(choice.logprobs.token_logprobs))  # of equal lengths
    best = create(client, n=2, best_of=4)
    assert texts(best) == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1] and best.usage.completion_tokens == 4 * 12


@pytest.mark.parametrize("options", [
    {"logprobs": 2, "echo": True, "n": 2}, {"prompt": ["Hello", "other"], "logprobs": 0},
    {"temperature": 0, "top_k": 5},
], ids=str)  # fmt: skip
def test_a_stream_is_the_answer_in_pieces(client, options):
    own = {**options, **({"extra_body": {"top_k": options["top_k"]}} if "top_k" in options else {})}
    own.pop("top_k", None)
    whole = create(client, **own)
    events = list(create(client, **own, stream=True, stream_options={"include_usage": True}))
    *pieces, last = events
    assert last.choices == [] and last.usage == whole.usage and all(event.usage is None for event in pieces)
    assert {event.id for event in events} == {last.id} and last.id != whole.id
    assert all(len(event.choices) == 1 for event in pieces)
    for choice in whole.choices:
        parts = [event.choices[0] for event in pieces if event.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if choice.logprobs is None:
            assert all(part.logprobs is None for part in parts)
            continue
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces_of_list = [getattr(part.logprobs, name) for part in parts]
            assert list(chain(*pieces_of_list)) == getattr(choice.logprobs, name)


def test_keys_of_vllm_and_openai_that_change_the_text(client):
    greedy = create(client, temperature=0).choices[0].text
    assert create(client, top_p=0).choices[0].text == greedy
    assert create(client, extra_body={"top_k": 1}).choices[0].text == greedy
    assert create(client, extra_body={"top_k": -1}).choices[0].text == create(client).choices[0].text
    assert create(client, logit_bias={"65": 100}, max_tokens=5).choices[0].text == "AAAAA"
    two = {"logit_bias": {"65": 100, "66": 85}, "temperature": 0}
    assert create(client, **two).choices[0].text == "A" * 12
    assert "AB" in create(client, **two, frequency_penalty=2).choices[0].text
    assert create(client, **two, extra_body={"no_repeat_ngram_size": 1}).choices[0].text.startswith("AB")
    ended = create(client, logit_bias={"65": 100}, extra_body={"stop_token_ids": [65], "return_token_ids": True})
    assert (ended.choices[0].finish_reason, ended.choices[0].token_ids) == ("stop", [65])
    assert ended.choices[0].prompt_token_ids == list(b"Hello")
    end = {"logit_bias": {"256": 100}}
    assert create(client, **end).choices[0].model_dump(include={"text", "finish_reason"}) == {
        "text": "", "finish_reason": "stop",
    }  # fmt: skip
    assert create(client, **end, max_tokens=3, extra_body={"ignore_eos": True}).usage.completion_tokens == 3
    assert create(client, **end, extra_body={"min_tokens": 4}).usage.completion_tokens == 5


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "dtgpt", 1024)
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="'other/model' is not served here; use 'tiny'"):
        client.models.retrieve("other/model")


def test_wrong_requests_raise_errors_that_name_the_key(client):
    for options, param, match in (
        ({"temperature": -1}, "temperature", "temperature=-1 is not valid; use a number from 0 to 100"),
        ({"max_tokens": 2000}, "max_tokens", "maximum context length is 1024 tokens; use max_tokens=1019 or less"),
        ({"max_tokens": 0}, "max_tokens", "add echo=true"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": [300]}, "prompt", "use 0 to 256"),
        ({"n": 2, "best_of": 1}, "best_of", "below n=2"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"extra_body": {"min_tokens": 5}, "max_tokens": 2}, "min_tokens", "min_tokens=5 is above max_tokens=2"),
        ({"extra_body": {"stop_token_ids": [999]}}, "stop_token_ids", "use a whole number from 0 to 256"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "use a whole number from 0 to 256"),
        ({"suffix": "end"}, "suffix", "does not support suffix='end'"),
        ({"extra_body": {"max_new_tokens": 5}}, "max_new_tokens", "did you mean max_tokens"),
        ({"n": 5}, None, "5 sequences of one prompt are more than the 4"),
    ):
        with pytest.raises(openai.BadRequestError, match=match) as caught:
            create(client, **options)
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, max_tokens=1020)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="model") as caught:
        create(client, model="gpt-4")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_full_server_is_asked_again_and_an_ending_one_refuses():
    with (
        served(make_model(), slots=2, limits=RequestLimits(queue=2)) as service, live_server(service) as address,
        client_of(address) as hasty, client_of(address, max_retries=2) as patient,
    ):  # fmt: skip
        busy = hasty.completions.create(model="tiny", **LONG, n=2, stream=True)
        next(busy)
        with pytest.raises(openai.RateLimitError, match="ask again later") as caught:
            create(hasty)
        assert caught.value.response.headers["retry-after"] == "1"
        threading.Timer(0.5, busy.close).start()
        assert create(patient).choices[0].text
        service.worker.stop()
        with pytest.raises(openai.InternalServerError, match="takes no new requests") as caught:
            create(hasty)
        assert caught.value.status_code == 503


@pytest.mark.slow(3)
def test_a_time_limit_ends_a_stream_with_an_error_and_is_not_retried():
    class Slow(ScriptedEngine):
        def step(self):
            time.sleep(0.02)
            return super().step()

    engine = Slow(lambda request, choice: [97] * 1001)  # 7 seconds for all, 0.1 for a short answer
    config = GPT2Config(num_layers=1, hidden_size=8, num_heads=1, vocab_size=257, seq_length=1024)
    with (
        served_script(engine, config, bytes_tokenizer(), limits=RequestLimits(seconds=1)) as service,
        live_server(service) as address, client_of(address, max_retries=2) as client,
    ):  # fmt: skip
        with pytest.raises(openai.APIError, match="not finished within 1 s"):
            list(client.completions.create(model="scripted", **LONG, n=4, stream=True))
        begin = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="not finished within 1 s"):
            client.completions.create(model="scripted", **LONG, n=4)
        assert time.monotonic() - begin < 3.5  # once: two more would take another 2 s, and waits of 1.1 s at least
        assert texts(create(client, model="scripted")) == ["a" * 12]


def test_a_failure_of_the_engine_is_an_error_in_a_stream_and_a_status_after_it():
    class Failing(ScriptedEngine):
        def step(self):
            time.sleep(0.02)
            events = super().step()
            if any(done > 9 for done in self.running.values()):
                raise RuntimeError("a cable was cut")
            return events

    engine = Failing(lambda request, choice: [97] * 99)
    config = GPT2Config(num_layers=1, hidden_size=8, num_heads=1, vocab_size=257, seq_length=64)
    with (
        pytest.raises(RuntimeError, match="a cable was cut"),
        served_script(engine, config, bytes_tokenizer()) as service, live_server(service) as address,
        client_of(address) as client,
    ):  # fmt: skip
        seen = []
        with pytest.raises(openai.APIError, match="the engine has failed"):
            seen.extend(create(client, model="scripted", max_tokens=40, stream=True))
        assert "".join(event.choices[0].text for event in seen).startswith("aaa")
        with pytest.raises(openai.InternalServerError, match="the engine has failed"):
            create(client, model="scripted")
