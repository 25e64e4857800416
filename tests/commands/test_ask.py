"""`dtgpt generate http://HOST:PORT`: texts of a server, and what users read where it does not give them."""

import io
import json
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dtgpt.checkpoint.export import save_weights
from dtgpt.cli import main
from dtgpt.commands.ask import address_of
from dtgpt.data.tokenizers.open import make_tokenizer
from tests.interop.test_interop_huggingface import InMemory
from tests.support.server import live_server, served, tiny_model

MODEL = {"init_std": 0.5}


@pytest.fixture(scope="module")
def model():
    return tiny_model(**MODEL)


@pytest.fixture(scope="module")
def service(model):
    with served(model, log_requests=False) as service:
        yield service


@pytest.fixture(scope="module")
def server(service):
    with live_server(service) as address:
        yield address


@pytest.fixture
def generate(capsys):
    """Run the command; return the exit code, stdout and stderr."""

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(["generate", *map(str, words)])
        return stop.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "weights"
    save_weights(InMemory(model), path, "here", make_tokenizer("bytes", [], 0))
    return path


@pytest.mark.parametrize("options", [
    [], ["--temperature", 0], ["--top-k", 3, "--seed", 7, "--max-new-tokens", 9], ["--num-samples", 2],
    ["--max-new-tokens", 20, "--ends", "off", "--logit-bias", "256:20", "--min-new-tokens", 2],
    ["--stop-strings", "e", "--top-p", 0.9, "--frequency-penalty", 1, "--no-repeat-ngram-size", 2],
    ["--stop-token-ids", "101", "--presence-penalty", 1, "--top-p-decay", 0.9, "--top-p-bound", 0.1],
], ids=lambda words: " ".join(map(str, words)))  # fmt: skip
def test_a_server_gives_the_text_of_the_model(server, folder, generate, options):
    local = generate(folder, "--prompt", "Hi: é", *options)
    assert local[0] == 0 and len(local[1]) > 10
    remote = generate(server, "--prompt", "Hi: é", *options)
    assert remote == (0, local[1], "")


def test_beams_come_with_their_scores(server, generate):
    code, out, err = generate(server, "--prompt", "Hi", "--num-beams", 3, "--num-samples", 2, "--max-new-tokens", 6)
    assert (code, err) == (0, "") and out.count("\nHi") == 2 and "--- 1 of 2, score -" in out
    assert "num_beams=2 cannot give 3" in generate(server, "--prompt", "Hi", "--num-beams", 2, "--num-samples", 3)[2]
    for words in (["--min-new-tokens", 2], ["--stop-token-ids", "5"]):
        assert "the beam search of a server" in generate(server, "--prompt", "Hi", "--num-beams", 2, *words)[2]
    ending = ["--stop-token-ids", "5", "--ends", "off"]
    assert generate(server, "--prompt", "Hi", "--num-beams", 2, "--max-new-tokens", 4, *ending)[0] == 0


def test_lines_are_continued_one_by_one_each_with_draws_of_its_own(server, generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"same\n\n{'x' * 70}\nsame\n"))
    code, out, err = generate(server, "--max-new-tokens", 20)
    first, second = (line for line in out.split("same")[1:])
    assert code == 0 and first != second and out.startswith("same")
    assert err.count("dtgpt: ") == 1 and "maximum context length is 64" in err


def test_ctrl_c_ends_the_text_and_not_the_program(server, generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    written = []

    def write(text):
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("dtgpt.commands.ask.write", write)
    assert generate(server, "--max-new-tokens", 50, "--ends", "off")[0] == 0
    assert written[0].startswith("one") and written[3] == "\n" and written[4].startswith("two") and written[-1] == "\n"


def test_a_file_of_prompts_becomes_json_lines_in_its_order(server, folder, generate, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"number {i}", "id": i, "temperature": 0} for i in range(20)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for model, name in ((folder, "local"), (server, "remote")):
        assert generate(model, "--prompts-file", prompts, "--output", tmp_path / name, "--max-new-tokens", 5)[0] == 0
    assert (tmp_path / "remote").read_text() == (tmp_path / "local").read_text()
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b", "num_beams": 2}\n')
    assert "line 2: the beams of a server" in generate(server, "--prompts-file", prompts)[2]
    prompts.write_text('{"prompt": "a", "max_new_tokens": 500}\n')
    assert "line 1: " in (err := generate(server, "--prompts-file", prompts)[2]) and "max_tokens=500" in err


@pytest.mark.parametrize("words, sentence", [
    (["--plan", "tp2"], "--plan is an option of the server"),
    (["--vocab-file", "x"], "--vocab-file is an option of the server"),
    (["--temperature", "200"], "temperature=200"), (["--max-new-tokens", "60"], "maximum context length"),
    (["--top-p-bound", "0.5", "--top-p", "0.1"], "top_p_bound=0.5 is above top_p=0.1"),
])  # fmt: skip
def test_options_that_cannot_be_met_are_one_sentence(server, generate, words, sentence):
    code, out, err = generate(server, "--prompt", "Hello", *words)
    assert code == 2 and sentence in err and err.count("\n") == 1 and "Hello" not in out


def test_a_key_is_sent_and_asked_for(model, generate, folder, monkeypatch):
    with served(model, api_key="secret", log_requests=False) as service, live_server(service) as address:
        asked = (address, "--prompt", "a", "--max-new-tokens", 2)
        assert "the API key is missing or wrong" in generate(*asked)[2]
        assert generate(*asked, "--api-key", "secret")[0] == 0
        monkeypatch.setenv("DTGPT_API_KEY", "secret")
        assert generate(*asked)[0] == 0
    assert "--api-key is for a server" in generate(folder, "--api-key", "x")[2]


def test_nobody_who_answers_is_one_sentence(generate):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_address[1]
    code, _, err = generate(f"http://127.0.0.1:{port}", "--prompt", "a")
    assert code == 2 and "does not answer (Connection refused); start a server with dtgpt serve MODEL" in err


@pytest.mark.parametrize("address", ["http://", "http://a:b", "http://u:p@h:1", "https://h?x=1", "http://h:99999",
    "http://\x01", "http://a b", "http://\xe9", f"http://{'a' * 64}"])  # fmt: skip
def test_a_wrong_address_is_one_sentence(generate, address):
    assert "is not the address of a server" in generate(address, "--prompt", "a")[2]


def test_an_address_is_told_from_a_path(tmp_path, monkeypatch):
    assert address_of(Path("http://localhost:5000/")) == "http://localhost:5000"
    assert address_of(Path("https://host/prefix")) == "https://host/prefix"
    monkeypatch.chdir(tmp_path)
    assert address_of(Path("localhost:5000")) == "http://localhost:5000"
    (tmp_path / "run:5000").mkdir()
    assert address_of(Path("run:5000")) is None and address_of(Path("runs/gpt2")) is None


@contextmanager
def other_server(*answers):
    """A server that gives its answers, as (status, body), in turn."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = left.pop(0)
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


PIECE = b'data: {"choices": [{"text": " b"}]}\n\n'


@pytest.mark.parametrize("status, body, sentence", [
    (200, b"<html>", "closed the connection before the answer was complete"),
    (200, PIECE, "closed the connection before the answer was complete"),
    (200, b"data: <html>\n", "not a JSON object"), (200, b"data: []\n", "not a JSON object"),
    (200, b'data: {"choices": [{}]}\n', "answers in a form that is not that of dtgpt serve"),
    (200, b'data: {"choices": [{"text": 5}]}\n', "answers in a form that is not that of dtgpt serve"),
    (200, PIECE + b'data: {"error": {"message": "the engine has failed"}}\n\n', "the engine has failed"),
    (404, b"<html>", "/v1/completions has status 404; is this a server of dtgpt?"),
    (418, b'{"error": "plain"}', "plain"), (500, b'{"message": "Internal Server Error"}', "Internal Server Error"),
])  # fmt: skip
def test_another_server_is_one_sentence(generate, status, body, sentence):
    with other_server((status, body)) as address:
        code, _, err = generate(address, "--prompt", "a", "--max-new-tokens", 4)
    assert code == 2 and sentence in err and err.count("\n") == 1


def test_a_file_waits_where_the_server_is_full(generate, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    choice = {"index": 0, "text": "b", "token_ids": [98], "finish_reason": "length"}
    full = 429, b'{"error": {"message": "full"}}'
    with other_server(full, full, (200, json.dumps({"choices": [choice]}).encode())) as address:
        code, out, _ = generate(address, "--prompts-file", tmp_path / "prompts.txt", "--max-new-tokens", 1)
    assert code == 0 and json.loads(out)["text"] == "b"
