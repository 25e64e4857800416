"""Servers in this process: over a real model or over an engine that follows a script, live on a loopback port or
called without one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dtgpt.config.plan import Plan
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.library.model import LibraryModel
from dtgpt.inference.model import Model, Need
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.mesh import Mesh
from dtgpt.serve.app import make_app
from dtgpt.serve.http import HttpServer, bind
from dtgpt.serve.service import Service
from dtgpt.serve.worker import EngineWorker
from tests.support.scripted_engine import ScriptedEngine
from tests.support.whole_model import build_model

CPU = torch.device("cpu")
SLOTS = 8


def bytes_tokenizer() -> Tokenizer:
    return make_tokenizer("bytes", [], 0)


def tiny_model(**shape: Any) -> Decoder:
    """A GPT-2 of random weights with the vocabulary of bytes: 257 tokens, 64 positions."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "seq_length": 64, "vocab_size": 257, **shape}
    return build_model(GPT2Config(**sizes), CPU, torch.float32, root_key(0))


def generator_of(model: Decoder | ModelConfig, tokenizer: Tokenizer | None, slots: int = SLOTS) -> LibraryModel:
    """A model, in fp32 on one process; of a config alone for engines that have no model."""
    config, stages = (model.config, [model]) if isinstance(model, Decoder) else (model, [])
    mesh = Mesh(Plan().for_world(1), CPU)
    return LibraryModel(stages, mesh, config, torch.float32, Path("nowhere"), slots, tokenizer)


@contextmanager
def served(
    model: Decoder | Model, tokenizer: Tokenizer | None = None, slots: int = SLOTS, **service: Any
) -> Iterator[Service]:
    """The service of a model, whose engine runs in a thread for the length of the block."""
    own = isinstance(model, Model)
    generator = model if own else generator_of(model, tokenizer or bytes_tokenizer(), slots)
    limits = service.pop("limits", None)
    worker = EngineWorker(generator.check, lambda: generator.slots, limits)

    def engine() -> None:
        generator.run(lambda: (Need(slots, 1), None), lambda engine, _: worker.run(engine))

    with _running(engine, worker):
        yield Service(generator, worker, "tiny", **service)


@contextmanager
def served_script(
    engine: ScriptedEngine, config: ModelConfig, tokenizer: Tokenizer, **service: Any
) -> Iterator[Service]:
    """The service of an engine that follows a script."""
    generator = generator_of(config, tokenizer, engine.slots)
    worker = EngineWorker(generator.check, lambda: engine.slots, service.pop("limits", None))
    engine.tokenizer, engine.special = tokenizer, generator.special
    with _running(lambda: worker.run(engine), worker):
        yield Service(generator, worker, "scripted", **service)


@contextmanager
def _running(engine: Any, worker: EngineWorker) -> Iterator[None]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    wait_until(lambda: worker.status().state != "starting" or bool(failures))
    try:
        yield
    finally:
        worker.stop()
        thread.join(60)
    assert not thread.is_alive(), "the engine does not end"
    if failures:
        raise failures[0]


def client(app: Starlette, **options: Any) -> TestClient:
    """A client that calls an application without a network. Errors inside become answers, as on a network."""
    return TestClient(app, base_url="http://127.0.0.1:5000", raise_server_exceptions=False, **options)


@contextmanager
def live_server(service: Service) -> Iterator[str]:
    """The address of a real server over a service, on a free port of loopback."""
    server = HttpServer(make_app(service), bind("127.0.0.1", 0))
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for a condition, at most so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


def http_client(address: str, **options: Any) -> httpx.Client:
    """A client of a live server, which uses no proxy, and reads no certificates, which takes a while."""
    limits = httpx.Limits(max_connections=200)
    return httpx.Client(base_url=address, trust_env=False, timeout=60, verify=False, limits=limits, **options)
