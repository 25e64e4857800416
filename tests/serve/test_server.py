"""The parts that all routes share: health, metrics, the log, connections, and a rank that does not answer."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.inference.request import LOGITS
from dtgpt.serve import http as http_module
from dtgpt.serve.access import names_of
from dtgpt.serve.app import make_app
from dtgpt.serve.http import HttpServer, bind
from dtgpt.serve.metrics import Metrics
from dtgpt.serve.signals import end_where_a_rank_is_silent
from dtgpt.serve.weights import WEIGHTS
from dtgpt.util.errors import UserError
from tests.support.server import client, http_client, live_server, served, tiny_model, wait_until

pytestmark = pytest.mark.slow(4)

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def service():
    with served(tiny_model(), hosts=frozenset({"127.0.0.1", "localhost"})) as service:
        yield service


@pytest.fixture(scope="module")
def http(service):
    with client(make_app(service)) as http:
        yield http


def test_health(service, http):
    assert http.get("/health").json() == {"status": "ready", "model": "tiny"}
    assert http.get("/health").headers["cache-control"] == "no-store"


def test_metrics_count_requests_tokens_and_times(service, http):
    before = metrics_of(http)
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    http.get("/of/nobody")
    after = metrics_of(http)

    def more(name):
        return after[name] - before.get(name, 0)

    assert more('dtgpt_requests_total{path="/v1/completions",code="200"}') == 1
    assert more('dtgpt_requests_total{path="other",code="404"}') == 1
    assert more("dtgpt_prompt_tokens_total") == 3 and more("dtgpt_new_tokens_total") == 5
    assert more("dtgpt_first_token_seconds_count") == 1 and more("dtgpt_round_seconds_count") >= 2
    assert after["dtgpt_slots"] == 8 and after["dtgpt_running"] == after["dtgpt_waiting"] == 0
    assert after['dtgpt_request_seconds_bucket{le="+Inf"}'] == after["dtgpt_request_seconds_count"]


def metrics_of(http):
    lines = http.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize("path", ["/v1/completion", "/v1/chat/completion", "/api/", "/health%0A"])
def test_an_unknown_path_is_answered_with_those_that_there_are(http, path):
    answer = http.post(path)
    sentence = answer.json()["error"]["message"]
    assert answer.status_code == 404 and "is not a path of this server; use one of /, /api" in sentence
    listed = sentence.rpartition("use one of ")[2].split(", ")
    known = {"/api", "/completions", "/health", "/metrics", "/tokenize", "/v1/completions", "/v1/models"}
    assert known | {"/v1/chat/completions"} < set(listed)
    assert all(http.get(one).status_code in (200, 405) for one in listed) and not any("." in one for one in listed)


def test_labels_of_metrics_are_escaped_and_numbers_keep_their_digits():
    metrics = Metrics()
    metrics.requests.add(1, 'a"\\\nb', "200")
    metrics.new_tokens.add(123_456_789)
    text = metrics.text({})
    assert 'dtgpt_requests_total{path="a\\"\\\\\\nb",code="200"} 1' in text.replace("1.0", "1")
    assert "dtgpt_new_tokens_total 123456789" in text


def test_the_log_has_sizes_and_times_but_no_prompt(http, capsys):
    http.post("/v1/completions?token=hidden", json={"prompt": "a secret", "max_tokens": 4, "ignore_eos": True})
    http.get("/line%0Abreak")
    log = capsys.readouterr().out
    assert " POST /v1/completions 200 " in log and ", 8 + 4 tokens, first after 0." in log
    assert "secret" not in log and "hidden" not in log and "/line\\nbreak" in log


def test_prompts_are_written_down_where_that_is_asked_for(capsys):
    with served(tiny_model(), log_prompts=True) as service, client(make_app(service)) as http:
        http.post("/v1/completions", json={"prompt": "a line\nand one", "max_tokens": 1})
        http.put("/api", json={"prompts": ["of Megatron's"], "tokens_to_generate": 1})
        http.put("/api", json={"prompts": ["not this"], "tokens_to_generate": 1, "no_log": True})
    log = capsys.readouterr().out
    assert "a line\\nand one" in log and "of Megatron's" in log and "not this" not in log


def test_log_probabilities_are_over_all_tokens_of_the_model():
    """Which has 300, its tokenizer 257: echoed, new, in both forms of answers."""
    model = tiny_model(vocab_size=300)
    with served(model) as service, client(make_app(service)) as http:
        asked = {"prompt": "hello", "max_tokens": 3, "logprobs": 2, "echo": True, "return_token_ids": True}
        (choice,) = http.post("/v1/completions", json=asked).json()["choices"]
        api = http.put("/api", json={"prompts": ["hello"], "tokens_to_generate": 0, "logprobs": True}).json()
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    with torch.no_grad():
        rows = model(torch.tensor([ids]))[0, :-1, :300].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    found = choice["logprobs"]
    assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    for logprob, top, best in zip(
        found["token_logprobs"][1:], found["top_logprobs"][1:], rows.topk(2).values, strict=True
    ):
        assert list(top.values())[:2] == pytest.approx(best.tolist(), abs=1e-4)
        assert logprob in top.values()  # the same number, not a near one
    assert api["logprobs"][0] == pytest.approx(expected[: len("ello")], abs=1e-4)


def test_a_text_ends_where_no_token_is_left():
    """Of three characters, none of which may come twice."""
    letters = make_tokenizer("char", ["abc"], 0)
    with served(tiny_model(), letters) as service, client(make_app(service)) as http:
        asked = {"prompt": "a", "max_tokens": 20, "no_repeat_ngram_size": 1, "ignore_eos": True, "logprobs": 1}
        (choice,) = http.post("/v1/completions", json=asked).json()["choices"]
    assert sorted(choice["text"]) == ["b", "c"] and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 2


def break_position(model, position=5):
    with torch.no_grad():
        model.embedding.wpe.weight[position] = torch.nan


def test_a_request_whose_logits_are_not_finite_is_an_error_in_its_form(monkeypatch):
    """Of weights that are finite, such as an overflow in fp16: the server goes on."""
    model = tiny_model()
    break_position(model)
    monkeypatch.setattr("dtgpt.serve.worker.has_finite_weights", lambda *_: True)
    with served(model) as service, client(make_app(service)) as http:
        bad, good = {"prompt": "abc", "max_tokens": 9}, {"prompt": "a", "max_tokens": 3}
        scored = {"max_tokens": 0, "echo": True, "logprobs": 1, "prompt": "abcdefgh", "ignore_eos": False}
        for more in ({}, {"logprobs": 1, "echo": True}, {"n": 2}, scored):
            found = http.post("/v1/completions", json={**bad, "ignore_eos": True, **more})
            assert found.status_code == 500 and found.headers["x-should-retry"] == "false", found.text
            assert found.json() == {"error": {"message": LOGITS, "type": "server_error", "param": None,
                                              "code": "not_finite"}}  # fmt: skip
        stream = http.post("/v1/completions", json={**bad, "ignore_eos": True, "stream": True})
        assert LOGITS in stream.text and "[DONE]" not in stream.text
        for more in ({}, {"logprobs": True}, {"beam_width": 2}):
            found = http.put("/api", json={"prompts": ["abcdef"], "tokens_to_generate": 9, **more})
            assert found.status_code == 500 and found.json() == {"message": LOGITS}
        assert http.post("/v1/completions", json=good).status_code == 200
        assert http.get("/health").json()["status"] == "ready"


def test_a_server_whose_weights_are_not_finite_is_not_ready():
    model = tiny_model()
    with served(model) as service, client(make_app(service)) as http:
        assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200
        break_position(model)
        assert http.post("/v1/completions", json={"prompt": "abcdefg", "max_tokens": 2}).status_code == 500
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "not_finite"
        assert "dtgpt_ready 0" in http.get("/metrics").text
        refused = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert refused.status_code == 503 and refused.json()["error"]["message"] == WEIGHTS
        refused = http.put("/api", json={"prompts": ["a"], "tokens_to_generate": 2})
        assert refused.status_code == 503 and refused.json() == {"message": WEIGHTS}


def test_a_fault_inside_is_an_answer_without_its_text(service, http, capsys, monkeypatch):
    monkeypatch.setattr(service.worker, "submit", lambda jobs: 1 / 0)
    answer = http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500 and "division" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert http.put("/api", json={"prompts": ["x"], "tokens_to_generate": 1}).json() == {
        "message": "Internal Server Error"
    }
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_connections_that_send_no_whole_request_end(service, monkeypatch):
    monkeypatch.setattr(http_module, "SILENT", 1.0)
    server = HttpServer(make_app(service), listener := bind("127.0.0.1", 0))
    server._server.config.timeout_notify = 0.0
    server.start()
    try:
        address = listener.getsockname()
        with socket.create_connection(address) as silent, socket.create_connection(address) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
            for connection in (silent, half):
                connection.settimeout(60)
                assert connection.recv(10) == b""
    finally:
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_an_address_that_another_process_took_since_is_a_sentence(service):
    first, second = (socket.socket() for _ in range(2))
    for one in (first, second):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    first.bind(("127.0.0.1", 0))
    second.bind(first.getsockname())
    second.listen()
    with first, second, pytest.raises(UserError, match=r"cannot be used .*--port"):
        HttpServer(make_app(service), first).start()


def test_names_of_a_server():
    with bind("localhost", 0) as listener:
        assert names_of("LocalHost", listener) == {"localhost", "127.0.0.1", "::1"}
    with bind("0.0.0.0", 0) as listener:
        assert names_of("0.0.0.0", listener) is None


def test_a_rank_that_does_not_answer_ends_the_server(service, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)

    async def hang(service):
        service.worker._commands.put(lambda engine: time.sleep(2))
        answer = asyncio.create_task(asyncio.to_thread(ask, service))
        wait = asyncio.create_task(asyncio.sleep(0.3))
        await wait
        end_where_a_rank_is_silent(service.worker, 60)
        assert not capsys.readouterr().err
        end_where_a_rank_is_silent(service.worker, 0.2)
        await asyncio.sleep(1.2)
        return await answer

    def ask(service):
        with client(make_app(service)) as http:
            return http.post("/v1/completions", json={"prompt": "x"})

    with served(tiny_model()) as own:
        answer = asyncio.run(hang(own))
    assert answer.status_code == 500 and "no rank has finished a step for 0.2 s" in answer.text
    assert codes == [1] and "start all of them again" in capsys.readouterr().err


def test_clients_of_the_benchmarks(service, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import serve_clients
    import soak

    with live_server(service) as address, http_client(address) as http:
        port = int(address.rpartition(":")[2])
        asked = {"prompt": "x", "max_tokens": 9, "seed": 1, "ignore_eos": True}
        answers = asyncio.run(serve_clients.run_clients(port, [[asked] * 2] * 3))
        expected = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        assert {answer.text for client in answers for answer in client} == {expected}
        assert all(one.begin <= one.first <= one.end for client in answers for one in client)
        before = soak.held_by(os.getpid(), port)
        assert asyncio.run(soak.load(port, 1.0, 1, [{"prompt": "Hello", "max_tokens": 5, "seed": 3}])) > 10
        after = soak.held_by(os.getpid(), port)
    assert after.running == after.waiting == 0 and after.resident < before.resident + 2**26
    sys.modules.pop("serve", None)
    wait_until(lambda: not service.worker._tickets)
