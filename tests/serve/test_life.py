"""A server as a program: its start, signals, and the death of a rank."""

import gc
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.serve.command import KEY, ServeOptions, name_of
from dtgpt.serve.http import bind
from dtgpt.serve.log import log, takes
from dtgpt.serve.server import Server
from dtgpt.serve.signals import EndBySignal
from tests.interop.test_interop_huggingface import InMemory
from tests.support import programs as support
from tests.support.server import http_client, served, tiny_model, wait_until
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(12)

CONFIG = GPT2Config(num_layers=2, hidden_size=16, num_heads=2, seq_length=4096, vocab_size=257)
LONG = {"prompt": "Hello", "max_tokens": 4000, "seed": 1, "ignore_eos": True}  # takes longer than any test here
TORCHRUN = [*support.TORCHRUN, "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "weights"
    model = build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))
    save_weights(InMemory(model), path, "here", make_tokenizer("bytes", [], 0))
    return path


class Program:
    """A server in a process of its own, or in those of torchrun."""

    def __init__(self, folder, *words, launcher=()):
        command = [*launcher, "-m", "dtgpt", "serve", str(folder), "--port", "0", "--slots", "4", *words]
        self.process = support.Program(command, ".", start_new_session=True)
        self.lines, self.errors = [], []
        self._readers = [
            threading.Thread(target=lambda: self.lines.extend(iter(self.process.stdout.readline, ""))),
            threading.Thread(target=lambda: self.errors.extend(iter(self.process.stderr.readline, ""))),
        ]
        for reader in self._readers:
            reader.start()
        wait_until(lambda: self.address or self.process.poll() is not None, 60)
        assert self.address, "".join(self.errors)

    @property
    def address(self):
        return next((line.split(" at ")[1].split(": ")[0] for line in self.lines if " is served at " in line), None)

    def end(self):
        """The exit code and what was written to stderr."""
        code = self.process.wait(60)
        for reader in self._readers:
            reader.join(10)
        return code, "".join(self.errors)


@contextmanager
def program(folder, *words, **more):
    server = Program(folder, *words, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.end()


def events(response):
    """The objects in the events of a stream."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_sigterm_ends_what_runs_with_what_it_has(folder):
    with program(folder, "--drain", "1") as server, http_client(server.address) as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: http.get("/health").status_code == 503)
            assert http.get("/health").json()["status"] == "draining"
            refused = http.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and "ending" in refused.json()["error"]["message"]
            assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
        code, errors = server.end()
    assert code == 0, errors
    assert "Traceback" not in errors and "SIGTERM: ending" in errors
    log = next(line for line in server.lines if "POST /v1/completions 200" in line)
    assert "5 + " in log and "Hello" not in "".join(server.lines)


def test_the_end_of_a_server_lets_python_collect_what_was_imported():
    """nanobind writes a page on stderr about objects of Triton that are there when Python has ended."""
    with served(tiny_model()) as service:
        server = Server(service, bind("127.0.0.1", 0), "127.0.0.1")
        gc.freeze()
        server.close()
    assert gc.get_freeze_count() == 0


def test_a_server_that_cannot_end_is_ended(monkeypatch):
    monkeypatch.setattr("dtgpt.serve.signals.LAST", 0.2)
    child = os.fork()
    if not child:  # no thread of its own, nor anything that would ask Python
        EndBySignal(None, 0.0).install()
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(60)
    try:
        wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), 20)
    finally:
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGALRM


def test_a_second_signal_ends_the_server_at_once(folder):
    with (
        program(folder, "--drain", "60", "--log-prompts", "on") as server,
        http_client(server.address) as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        next(events(response))
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: http.get("/health").status_code == 503)  # a second one before would be the same signal
        server.process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert server.end()[0] == 130 and time.monotonic() - begin < 40
    assert any("Hello" in line for line in server.lines)


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch):
    end, pipe = os.pipe()
    with os.fdopen(end), os.fdopen(pipe, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert takes(stream) and takes(io.StringIO())
        for _ in range(100):
            log("x" * 5000)  # more than any pipe holds
        assert not takes(stream)


def test_a_server_outlives_the_readers_of_its_output(folder):
    process = support.Program(["-m", "dtgpt", "serve", str(folder), "--port", "0", "--slots", "4"], ".")
    try:
        line = next(line for line in iter(process.stdout.readline, "") if " is served at " in line)
        process.stdout.close()
        process.stderr.close()
        with http_client(line.split(" at ")[1].split(": ")[0]) as http:
            for asked in ({**LONG, "max_tokens": 3}, {"prompt": 1}):
                assert http.post("/v1/completions", json=asked).status_code == (200 if "seed" in asked else 400)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_the_death_of_a_rank_ends_all_and_is_named_in_the_answer(folder):
    with program(folder, "--plan", "tp2", launcher=TORCHRUN) as server, http_client(server.address) as http:
        alone = http.post("/v1/completions", json={**LONG, "max_tokens": 20})
        assert alone.json()["usage"]["completion_tokens"] == 20
        # The stream is silent until the death is noticed, by a connection or, at the latest, by `lost_after` = 20 s.
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            stream = events(response)
            next(stream)
            begin = time.monotonic()
            os.kill(rank_of(server.process.pid, 1), signal.SIGKILL)
            error = list(stream)[-1]["error"]
        code, errors = server.end()
    assert error["type"] == "server_error" and "process" in error["message"], error
    assert code != 0 and time.monotonic() - begin < 50
    assert "another process of the run ended" in errors, errors


def test_the_death_of_a_rank_ends_an_idle_server(folder):
    with program(folder, "--plan", "pp2", launcher=TORCHRUN) as server:
        os.kill(rank_of(server.process.pid, 1), signal.SIGKILL)
        code, errors = server.end()
    assert code != 0 and "another process of the run ended" in errors, errors


def rank_of(launcher, rank):
    """The id of the process of a rank among the children of a launcher, which starts them in this order."""
    pids = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    assert len(pids) == 2, pids
    return pids[rank]


@pytest.fixture
def refusal(folder, capsys, monkeypatch):
    """Run the command with wrong words; return its sentence."""
    monkeypatch.delenv(KEY, raising=False)

    def call(*words, path=folder):
        with pytest.raises(SystemExit) as stop:
            main(["serve", str(path), *words])
        errors = capsys.readouterr().err
        assert stop.value.code == 2 and errors.count("\n") == 1, errors
        return errors

    return call


def test_what_cannot_be_served_is_one_sentence_before_weights_are_read(refusal, monkeypatch):
    monkeypatch.setattr("dtgpt.serve.command.Model", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1 port {port} cannot be used" in refusal("--port", str(port))
    assert "nowhere" in refusal("--port", "0", path="/nowhere")
    assert "is not an address" in refusal("--host", "no such host")
    for words in (("--host", "0.0.0.0"), ("--host", "::")):
        assert "--api-key" in refusal(*words, "--port", "0")
    for address in ("192.0.2.1", "fe80::1"):  # of documentation, and without its interface
        sentence = refusal("--host", address)
        assert "--host" in sentence and "--port" not in sentence, sentence
    for name in ("", "two\nlines", "x" * 300):
        assert "printable" in refusal("--name", name, "--port", "0")
    assert "600 is too large" in refusal("--slots", "600")
    assert "1 to 512, or auto" in refusal("--slots", "many")
    assert "visible ASCII" in refusal("--api-key", "two words")
    assert "visible ASCII" in refusal("--api-key", "")


def test_a_folder_of_any_name_has_a_name_that_answers_can_have():
    for folder, name in (("gpt2 é", "gpt2 é"), ("a\nb", "a_b"), ("b\udcff", "b_"), ("x" * 255, "x" * 200)):
        assert name_of(ServeOptions(), Path("/nowhere", folder)) == name
    assert name_of(ServeOptions(), Path("/")) == "model"
    assert name_of(ServeOptions(name="mine"), Path("/nowhere")) == "mine"


def test_a_missing_package_is_named_with_the_command_that_installs_it(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'dtgpt[serve]'" in refusal()
