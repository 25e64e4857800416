"""The server beside the engine alone: tokens/s at many clients, time to the first token at one client and at many.

    python benchmarks/serve.py --model 345m
    python benchmarks/serve.py --model tiny --device cpu --clients 8 --requests 2 --prompt_tokens 16 --new_tokens 16

Random weights, written to a temporary folder. The engine and the server do the same requests with as many slots as
there are clients: prompts of random ids, and numbers of new tokens from half to one and a half times `--new_tokens`, so
that clients do not stay in step. A client sends its next request when it has the whole answer to the one before; the
engine alone does the same without HTTP. Clients are a process of their own, and stream.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import note
from serve_clients import Answer
from torch import Tensor

import dtgpt
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.inference.engine import Engine
from dtgpt.inference.model import Need
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M, GPT2_774M, GPT2_1558M, GPT2Config
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges, Source
from dtgpt.ops.random.philox import root_key
from dtgpt.serve.warm_up import warm_up
from dtgpt.util.hardware import environment
from tests.support.whole_model import build_model

TINY = GPT2Config(num_layers=2, hidden_size=128, num_heads=4, seq_length=64, vocab_size=1024)
MODELS = {"tiny": TINY, "124m": GPT2_124M, "345m": GPT2_345M, "774m": GPT2_774M, "1558m": GPT2_1558M}
HERE = Path(__file__).parent
START = 600.0  # seconds that a server has to be ready


def requests_of(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The requests of each client, the same in every run."""
    draw = random.Random(1)
    low, high = max(1, args.new_tokens // 2), args.new_tokens + args.new_tokens // 2
    return [
        [
            {
                "prompt": [draw.randrange(256) for _ in range(args.prompt_tokens)],
                "max_tokens": draw.randint(low, high), "seed": draw.randrange(2**31), "ignore_eos": True,
            }
            for _ in range(args.requests)
        ]
        for _ in range(args.clients)
    ]  # fmt: skip


class RandomWeights(Source):
    """The weights of a model in memory."""

    def __init__(self, model: Decoder):
        self.config, self._parameters = model.config, unique_parameters(model)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        return cut(self._parameters[name].detach(), part).cpu()


def write_model(name: str, folder: Path, device: str) -> None:
    """Write random weights, and the tokenizer of bytes, which no download is needed for."""
    config = MODELS[name]
    model = build_model(config, torch.device(device), torch.float32, root_key(0))
    save_weights(RandomWeights(model), folder, "random weights", make_tokenizer("bytes", [], 0))


def engine_rate(folder: Path, args: argparse.Namespace) -> float:
    """Tokens/s of the engine alone, in a process of its own, which leaves its memory to the server."""
    command = [sys.executable, __file__, *sys.argv[1:], "--engine", str(folder)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def measure_engine(folder: Path, args: argparse.Namespace) -> None:
    """Print tokens/s of the engine alone."""
    model = dtgpt.load(folder, device=args.device, slots=args.clients)

    def job(asked: dict[str, Any]) -> PromptJob:
        return PromptJob(asked["prompt"], Options(max_new_tokens=asked["max_tokens"], seed=asked["seed"], ends=False))

    def work(engine: Engine, _: None) -> float:
        warm_up(engine, args.clients, model.config.seq_length, model.mesh.device.type == "cuda")
        begin, new = time.monotonic(), 0
        clients = [iter(map(job, requests)) for requests in requests_of(args)]
        running = {engine.submit(next(client)): client for client in clients}
        while running:
            for update in engine.step():
                new += len(update.ids)
                if update.completions is not None:
                    client = running.pop(update.job)
                    if (following := next(client, None)) is not None:
                        running[engine.submit(following)] = client
        return new / (time.monotonic() - begin)

    print(model.run(lambda: (Need(args.clients, 1), None), work))


class Running(NamedTuple):
    """A server that listens."""

    port: int
    process: int


@contextmanager
def server(folder: Path, args: argparse.Namespace) -> Iterator[Running]:
    """A server in a process of its own."""
    command = [sys.executable, "-m", "dtgpt", "serve", str(folder), "--port", "0", "--slots", str(args.clients)]
    process = subprocess.Popen([*command, "--device", args.device], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" at http://127\.0\.0\.1:([0-9]+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        reader = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)  # its log
        yield Running(int(found[1]), process.pid)
        process.terminate()
        process.wait(60)
        reader.wait(10)
    finally:
        process.kill()


def answers_of(port: int, clients: list[list[dict[str, Any]]]) -> list[list[Answer]]:
    """The answers to all requests, by clients in another process."""
    body = json.dumps({"port": port, "clients": clients})
    command = [sys.executable, str(HERE / "serve_clients.py")]
    output = subprocess.run(command, input=body, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [[Answer(*times) for times in client] for client in json.loads(output)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    clients = requests_of(args)
    engine = engine_rate(folder, args)
    with server(folder, args) as running:
        alone = [answer.first - answer.begin for answer in answers_of(running.port, [clients[0] * 5])[0]]
        answers = answers_of(running.port, clients)
    flat = [answer for client in answers for answer in client]
    seconds = max(answer.end for answer in flat) - min(answer.begin for answer in flat)
    new = sum(request["max_tokens"] for client in clients for request in client)
    first = [answer.first - answer.begin for answer in flat]
    return {
        "clients": args.clients, "requests": len(flat), "engine tokens/s": engine, "server tokens/s": new / seconds,
        "share of the engine": new / seconds / engine,
        "first token at 1 client, ms": {"median": 1e3 * statistics.median(alone), "most": 1e3 * max(alone)},
        f"first token at {args.clients} clients, ms": {
            "median": 1e3 * statistics.median(first), "p99": 1e3 * percentile(first, 0.99),
        },
    }  # fmt: skip


def hand_over(figures: dict[str, Any], clients: int) -> None:
    """Hand the figures to all.py."""
    rates = {name: figures[name] for name in ("engine tokens/s", "server tokens/s", "share of the engine")}
    note(f"{clients} clients", rates)
    for count in (1, clients):
        first = figures[f"first token at {count} client{'s' * (count > 1)}, ms"]
        note(f"first token at {count}", {f"{name} ms": value for name, value in first.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="345m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=256, help="on average")
    parser.add_argument("--output", help="file for the figures as JSON")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        measure_engine(args.engine, args)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        write_model(args.model, folder, args.device)
        figures = {"model": args.model, **measure(args, folder)}
    print(json.dumps(figures, indent=1))
    hand_over(figures, args.clients)
    if args.output:
        Path(args.output).write_text(json.dumps({**environment(torch.device(args.device)), **figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
