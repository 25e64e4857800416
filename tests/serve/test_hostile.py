"""Requests that nobody should send, and clients that behave badly: each gets an error of its own, no slot is lost, and
the next request works."""

import asyncio
import json
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from dtgpt.data.library_tokenizers.byte_level import ByteLevel
from dtgpt.serve import body as body_module
from dtgpt.serve.access import client_of, host_name
from dtgpt.serve.app import make_app
from dtgpt.serve.http import allow_many_connections
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.openai_answer import CompletionAnswer
from dtgpt.serve.service import CLIENT, LARGE, SIZE, client_has_left, in_thread
from dtgpt.serve.ticket import ClientGone
from tests.support.server import client, http_client, live_server, served, tiny_model, wait_until

pytestmark = pytest.mark.slow(7)

JSON = {"Content-Type": "application/json"}
SMALL = {"prompt": "Hello", "max_tokens": 3, "seed": 7, "ignore_eos": True}
ENDLESS = {**SMALL, "max_tokens": 4000}
POSTS = {"/v1/completions": "POST", "/completions": "POST", "/api": "PUT", "/tokenize": "POST", "/detokenize": "POST"}


@pytest.fixture(scope="module")
def service():
    model = tiny_model(seq_length=4096)
    with served(
        model, limits=RequestLimits(read_seconds=0.4), hosts=frozenset({"127.0.0.1"}), log_requests=False
    ) as service:
        yield service


@pytest.fixture(scope="module")
def address(service):
    with live_server(service) as address:
        yield address


@pytest.fixture(scope="module")
def http(address):
    with http_client(address) as http:
        yield http


@pytest.fixture(scope="module")
def near(service):
    """A client of the application alone."""
    with client(make_app(service)) as near:
        yield near


@pytest.fixture(autouse=True)
def nothing_is_left(service, http):
    """After each test no request holds a slot, and a request is answered as always."""
    yield
    wait_until(lambda: idle(service), 1)
    answer = http.post("/v1/completions", json=SMALL)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3


def idle(service):
    worker = service.worker
    return not (worker._tickets or worker._rows or worker._places)


def connect(address):
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def head(path="/v1/completions", method="POST", **headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]).encode()


def received(connection):
    """What arrives until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


BODIES = {
    "nothing": b"", "half": b'{"prompt": "He', "no JSON": b"prompt=Hello", "two": b"{} {}",
    "not UTF-8": b'{"prompt": "\xff"}', "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "too large a number": b'{"prompt": "x", "temperature": 1e999}',
    "a number of many digits": b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
    "a key twice": b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a surrogate pair as a key": b'{"prompt": "x", "\\udc00": 1}',
    "nested lists": b'{"prompt": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}", "very deep": b"[" * 500_000,
    "very deep objects": b'{"a":' * 150_000, "brackets in a text that does not end": b'{"prompt": "' + b"[" * 1000,
    "a list": b"[1]", "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
def test_what_is_not_strict_json_is_refused_everywhere(near, content):
    for path, method in POSTS.items():
        answer = near.request(method, path, content=content, headers=JSON)
        assert answer.status_code == 400, (path, answer.text)
        message = answer.json()["message" if path == "/api" else "error"]
        assert message and (path == "/api" or message["type"] == "invalid_request_error")


def test_a_compressed_body_is_refused_by_name(near):
    for path, method in POSTS.items():
        answer = near.request(method, path, content=b"\x1f\x8b", headers={**JSON, "Content-Encoding": "gzip"})
        assert answer.status_code == 415 and ("'gzip'" in answer.text or path == "/api"), answer.text


def test_sentences_about_bodies_and_ids_stay_short(near):
    answer = near.post("/v1/completions", content=b'{"prompt": "He', headers=JSON)
    assert "starting at character 11" in answer.json()["error"]["message"]
    answer = near.post("/v1/completions", json={**SMALL, "prompt": [10**900]})
    assert answer.status_code == 400 and len(answer.text) < 400


def test_a_long_body_is_read_beside_the_event_loop(near):
    answer = near.post("/tokenize", json={"prompt": "x" * 100_000})
    assert answer.json()["count"] == 100_000
    assert near.post("/tokenize", content=b"[" * 100_000, headers=JSON).status_code == 400


def test_an_answer_about_many_tokens_is_written_beside_the_event_loop(near, monkeypatch):
    threads, render = [], JSONResponse.render

    def noted(response, content):
        threads.append(threading.current_thread().name.partition("_")[0])
        return render(response, content)

    monkeypatch.setattr(JSONResponse, "render", noted)
    answer = near.post("/tokenize", json={"prompt": "xy" * 20_000, "return_token_strs": True})
    assert answer.json()["token_strs"] == ["x", "y"] * 20_000 and threads == ["large requests"]


def test_a_prompt_too_long_ends_the_reading_of_a_batch(near, monkeypatch):
    encoded, encode = [], ByteLevel.encode
    monkeypatch.setattr(ByteLevel, "encode", lambda own, text, *more: encoded.append(text) or encode(own, text, *more))
    for path, keys in (("/api", {"tokens_to_generate": 1}), ("/v1/completions", {"max_tokens": 1})):
        name = "prompts" if path == "/api" else "prompt"
        for first in ("x" * 5000, "x" * 20_000, "\u0301\u0316" * 30_000):
            encoded.clear()
            answer = near.request(POSTS[path], path, json={name: [first, *["y" * 4000] * 50], **keys})
            assert answer.status_code == 400 and "length" in answer.text.lower(), answer.text
            assert sum(map(len, encoded)) < 20_000


def test_a_clock_that_goes_back_changes_no_time_limit(http, monkeypatch):
    """Limits are on a clock of their own; the wall clock is in the log and in `created` alone."""
    times = iter(range(10**9, 0, -(10**6)))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(times)))
        answers = [http.post("/v1/completions", json=SMALL) for _ in range(3)]
        assert http.get("/health").json()["status"] == "ready"
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


def test_a_server_that_ends_reads_no_more_bodies(monkeypatch):
    with served(tiny_model()) as service, client(make_app(service)) as http:
        service.worker.drain(5)
        monkeypatch.setattr(body_module, "parse_object", None)
        for path, method in POSTS.items():
            answer = http.request(method, path, json=SMALL)
            assert answer.status_code == 503 and "the server is ending" in answer.text


def test_brackets_in_texts_are_not_nesting(near):
    answer = near.post("/v1/completions", json={**SMALL, "prompt": '["[{' * 200})
    assert answer.status_code == 200, answer.text


def test_long_bodies_and_answers_do_not_hold_other_requests_up(near, monkeypatch):
    threads = []

    def noted(work):
        def note(*arguments):
            threads.append(threading.current_thread().name.partition("_")[0])
            return work(*arguments)

        return note

    monkeypatch.setattr(body_module, "parse_object", noted(body_module.parse_object))
    monkeypatch.setattr(CompletionAnswer, "whole", noted(CompletionAnswer.whole))
    near.post("/v1/completions", json=SMALL)
    loop, also_loop = threads
    assert loop == also_loop != "requests"
    near.post("/v1/completions", json={**SMALL, "prompt": [72] * 1000, "n": 2, "echo": True, "logprobs": 0})
    assert threads[2:] == ["requests"] * 2


def test_another_content_type_is_refused(near):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
        for path, method in POSTS.items():
            answer = near.request(method, path, content=json.dumps(SMALL), headers={"Content-Type": kind})
            assert answer.status_code == 415, (path, kind)
    assert near.post(
        "/v1/completions", json=SMALL, headers={"Content-Type": "Application/JSON;charset=utf-8"}
    ).is_success


def test_paths_and_methods_that_do_not_exist(near):
    for path in ("/api/", "/v1", "/../etc/passwd", "/%2e%2e/etc/passwd", "/v1/completions/", "/\ud7ff", "/health/x",
                 "/health%0a", "/%0a"):  # fmt: skip
        assert near.get(path).status_code == 404, path
    assert near.post("/api", json=SMALL).status_code == 405
    assert near.post("/api", json=SMALL).json() == {"message": "The method is not allowed for the requested URL."}
    assert near.get("/v1/completions").status_code == 405
    assert "POST" in near.get("/v1/completions").headers["allow"]


def test_other_names_of_the_server_are_refused(near):
    for host in ("evil.example", "127.0.0.1.evil.example", "[::1", "", "127.0.0.1@evil.example",
                 "127.0.0.1:80@evil.example", "127.0.0.1:80:80", "127.0.0.1:+80", "127.0.0.1:65536", "127.0.0.1:x",
                 "127.0.0.1 evil.example", "127.0.0.1:80 ", "127.0.0.1/", "127.0.0.1?", "127.0.0.1#", "127.0.0.1,evil",
                 "[127.0.0.1]", "[127.0.0.1]evil.example", ":80", "user@127.0.0.1", "http://127.0.0.1"):  # fmt: skip
        answer = near.post("/v1/completions", json=SMALL, headers={"Host": host})
        assert answer.status_code == 403, host
    for host in ("127.0.0.1", "127.0.0.1:80", "127.0.0.1:", "127.0.0.1."):  # RFC 3986 allows an empty port
        assert near.get("/health", headers={"Host": host}).status_code == 200


def test_a_host_header_is_a_name_and_a_port():
    names = {"localhost": "localhost", "LocalHost:5000": "localhost", "[::1]": "::1", "[::1]:5000": "::1"}
    assert {header: host_name(header) for header in names} == names
    for header in ("::1", "[::1]evil", "[::1]:80@evil", "[localhost]", "[::1%25lo]", "localhost:80@evil", "local host",
                   "localhost:80\n", "localhost\t", "localhost:\u0663", "[::1]]", "[]", "[::1]:99999"):  # fmt: skip
        assert host_name(header) is None, header


def test_a_key_is_needed_for_all_but_health_and_the_page():
    with served(tiny_model(), api_key="secret") as service, client(make_app(service)) as http:
        assert http.get("/health").status_code == 200
        for given in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"Authorization": "secret"},
        ):
            for path, method in {**POSTS, "/v1/models": "GET", "/metrics": "GET", "/nothing": "GET"}.items():
                answer = http.request(method, path, headers=given)
                assert answer.status_code == 401 and "secret" not in answer.text, path
        with_key = {"Authorization": "Bearer secret"}
        assert http.post("/v1/completions", json=SMALL, headers=with_key).status_code == 200
        assert http.get("/nothing", headers=with_key).status_code == 404


def test_a_client_is_its_key_or_its_address(monkeypatch):
    with served(tiny_model(), api_key="one,two") as service, client(make_app(service)) as http:
        clients, submit = [], service.worker.submit
        monkeypatch.setattr(service.worker, "submit", lambda jobs: clients.append(jobs[0].client) or submit(jobs))
        for key in ("one", "two"):
            http.post("/v1/completions", json=SMALL, headers={"Authorization": f"Bearer {key}"})
        for key in ("one,two", "", "on"):
            assert http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        for only in (None, "one"):
            service.api_key = only
            http.post("/v1/completions", json=SMALL, headers={"Authorization": "Bearer one"})
    assert clients == ["key 1", "key 2", "testclient", "testclient"]


def test_a_client_with_many_connections_starves_nobody(address, http, monkeypatch, service):
    """The other one, of another address, has room in a full queue, and the next slot."""
    monkeypatch.setattr(service.worker, "limits", replace(service.limits, queue=64, read_seconds=30.0))
    over, asked = threading.Event(), {**SMALL, "max_tokens": 20, "n": 4}

    def greedy(_):
        transport = httpx.HTTPTransport(verify=False, local_address="127.0.0.2")  # reads no certificates
        with httpx.Client(transport=transport, timeout=60) as one:
            while not over.is_set():
                assert one.post(f"{address}/v1/completions", json=asked).status_code in (200, 429)
                time.sleep(0.02)

    with ThreadPoolExecutor(20) as threads:
        ends = threads.map(greedy, range(20))
        wait_until(lambda: service.worker.status().clients.get("127.0.0.2", 0) >= 60, 20)
        lines = http.get("/metrics").text
        found = [http.post("/v1/completions", json=SMALL).status_code for _ in range(10)]
        over.set()
        assert list(ends) == [None] * 20
    assert found == [200] * 10 and 'dtgpt_client_sequences{client="127.0.0.2"} 6' in lines


class Asked:
    """A request whose body has been read, and whose client may leave."""

    def __init__(self, size=0):
        self.scope, self.leaves = {SIZE: size}, asyncio.Event()

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def test_a_client_with_long_prompts_leaves_a_thread_to_others():
    async def work(client, count):
        CLIENT.set(client)
        begin = time.monotonic()
        await asyncio.gather(*(in_thread(Asked(), time.sleep, 0.1) for _ in range(count)))
        return time.monotonic() - begin

    async def both():
        return await asyncio.gather(work("many", 8), work("few", 1))

    many, few = asyncio.run(both())
    assert many >= 0.8 and few < 0.75 * many


def test_large_requests_of_many_clients_hold_no_small_one_up():
    async def work():
        over = threading.Event()
        large = []
        for name in "abcd":
            CLIENT.set(name)
            large.append(asyncio.create_task(in_thread(Asked(LARGE), over.wait, 30)))
        begin = time.monotonic()
        assert await in_thread(Asked(LARGE - 1), lambda: "small") == "small"
        seconds = time.monotonic() - begin
        over.set()
        return seconds, await asyncio.gather(*large)

    seconds, ends = asyncio.run(work())
    assert seconds < 5 and ends == [True] * 4


def test_work_ends_when_its_client_has_left():
    async def work():
        begun, ended = threading.Event(), threading.Event()

        def long():
            begun.set()
            while not client_has_left():
                time.sleep(0.01)
            ended.set()

        first, second, never = Asked(), Asked(), []
        one = asyncio.create_task(in_thread(first, long))
        two = asyncio.create_task(in_thread(second, never.append, 1))  # the same client's: it waits for its turn
        await asyncio.to_thread(begun.wait)
        for asked in (second, first):
            asked.leaves.set()
        found = await asyncio.gather(one, two, return_exceptions=True)
        await asyncio.to_thread(ended.wait, 5)
        assert await in_thread(Asked(), lambda: 7) == 7 and ended.is_set() and not never
        return found

    assert [type(error) for error in asyncio.run(work())] == [ClientGone] * 2


def test_addresses_of_one_network_are_one_client():
    names = {
        "10.0.0.7": "10.0.0.7", "::ffff:10.0.0.7": "10.0.0.7", "::1": "::1", "2001:db8:1:2:3::4": "2001:db8:1:2::/64",
        "2001:db8:1:2::9": "2001:db8:1:2::/64", "fe80::1%eth0": "fe80::/64", "testclient": "testclient",
    }  # fmt: skip
    assert {address: client_of((address, 80)) for address in names} == names and client_of(None) == "-"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(
    ["prompt", "prompts", "max_tokens", "tokens_to_generate", "temperature", "top_k", "top_p", "n", "best_of", "stop",
     "logprobs", "echo", "stream", "stream_options", "seed", "model", "logit_bias", "frequency_penalty", "min_tokens",
     "suffix", "add_BOS", "beam_width", "stop_token", "random_seed", "top_p_decay", "length_penalty", "tokens",
     "add_special_tokens", "stop_token_ids", "return_token_ids"]
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    path=st.sampled_from(list(POSTS)), changed=st.dictionaries(KEYS, ANY_JSON, max_size=3), left_out=st.booleans()
)  # fmt: skip
def test_no_json_is_a_fault_of_the_server(near, path, changed, left_out):
    start = {
        "/api": {"prompts": ["Hello"], "tokens_to_generate": 2}, "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }.get(path, SMALL)  # fmt: skip
    body = {**({} if left_out else start), **changed}
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 50)
    answer = near.request(POSTS[path], path, json=body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        sentence = answer.json()["message"] if path == "/api" else answer.json()["error"]["message"]
        assert sentence and "\n" not in sentence and "Traceback" not in sentence


def test_a_body_that_is_too_long_is_refused_before_it_has_arrived(address):
    with connect(address) as connection:
        connection.sendall(head(Content_Length=2**30) + b"\r\n\r\n{")
        assert received(connection).startswith(b"HTTP/1.1 413")
    with connect(address) as connection:  # whose length nobody knows before
        connection.sendall(head(Transfer_Encoding="chunked") + b"\r\n\r\n")
        sent, chunk = 0, b"10000\r\n" + b" " * 65536 + b"\r\n"
        with suppress(ConnectionError):
            for _ in range(16384):  # 1 GiB
                connection.sendall(chunk)
                sent += len(chunk)
        assert sent < 2**25
        assert b" 413 " in received(connection)[:20] or sent


def test_a_client_whose_body_is_a_little_too_long_gets_to_know_it(http, service, monkeypatch):
    monkeypatch.setattr(service.worker, "limits", replace(service.limits, read_seconds=30.0))  # machines may be busy
    answer = http.post("/v1/completions", json={**SMALL, "prompt": "x" * 3_000_000})
    assert answer.status_code == 413 and "1.0 MiB" in answer.json()["error"]["message"]


def test_a_body_that_arrives_slowly_or_never_is_refused(address):
    with connect(address) as connection:
        connection.sendall(head(Content_Length=100) + b'\r\n\r\n{"prompt": ')
        begin = time.monotonic()
        assert b" 408 " in received(connection)[:20] and time.monotonic() - begin < 30


def test_garbage_in_place_of_http_ends_the_connection(address):
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00" * 20,
        b"GET\r\n\r\n",
        b"\x00" * 100_000,
        head() + b"\r\n: \r\n\r\n",
    ):
        with connect(address) as connection, suppress(ConnectionError):
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 " not in received(connection)[:20]


def test_clients_that_leave_at_any_point_lose_nothing(address, service):
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    whole = head(Content_Length=len(body)) + b"\r\n\r\n" + body
    for end in range(1, len(whole), 23):
        with connect(address) as connection:
            connection.sendall(whole[:end])
    for size in (0, 1, 30, 300):  # bytes of the answer that are read
        with connect(address) as connection:
            connection.sendall(whole)
            while size > 0:
                size -= len(connection.recv(size))
    wait_until(lambda: idle(service), 2)


@pytest.mark.parametrize("path", ["/v1/completions", "/api"])
def test_a_client_that_leaves_without_streaming_frees_its_slots_within_a_second(address, service, path):
    asked = (
        ENDLESS if path != "/api" else {"prompts": ["x", "y"], "tokens_to_generate": 4000, "stop_on_double_eol": True}
    )
    with http_client(address) as http, pytest.raises(httpx.ReadTimeout):
        http.request(POSTS[path], path, json=asked, timeout=0.3)
    wait_until(lambda: idle(service), 1)


def test_many_connections_at_once(address, service):
    allow_many_connections()
    most = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 200)  # both ends are in this process
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(address)) for _ in range(most)]
        for connection in connections:
            connection.sendall(head("/health", "GET") + b"\r\n\r\n")
        assert all(connection.recv(65536).startswith(b"HTTP/1.1 200") for connection in connections)
    assert most > 100


def test_an_answer_does_not_depend_on_the_load(http, service, monkeypatch):
    monkeypatch.setattr(service.worker, "limits", replace(service.limits, read_seconds=30.0))  # machines may be busy
    requests = [
        {**SMALL, "prompt": f"number {i % 7}" * (1 + i % 3), "max_tokens": 3 + i % 9, "seed": i} for i in range(64)
    ]

    def ask(request):
        answer = http.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    alone = [ask(request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        assert list(threads.map(ask, requests)) == alone
    assert len({str(texts) for texts in alone}) > 60
