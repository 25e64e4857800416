"""Seconds to score LAMBADA and HellaSwag, beside transformers in batches, on the same random weights in one run.

    python benchmarks/evaluate.py --model 345m
    python benchmarks/evaluate.py --model 345m --lambada lambada_test.jsonl --hellaswag hellaswag_val.jsonl
    python benchmarks/evaluate.py --model tiny --device cpu --dtype fp32 --samples 40

Without files, samples of random ids have the lengths of the data sets. transformers scores as the `hf` back end of
lm-evaluation-harness does: samples sorted by length, padded batches, log-softmax of all logits, sums read one by one.
It may get a part of the samples (`--peer_part`), whose time is extrapolated. Weights are loaded before, and the clock
includes all from ids to numbers on the host. `of forward` is the rate of input tokens, without padding, over that of
full windows of which one token each is scored.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from figures import note
from transformers_model import transformers_model

import dtgpt
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.evaluation.batches import Sample, fitted
from dtgpt.evaluation.catalog import asked_for, prepare
from dtgpt.evaluation.scoring import Scorer, scorer_of
from dtgpt.evaluation.tasks import TaskOptions
from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M, GPT2_774M, GPT2_1558M, GPT2Config
from dtgpt.util.hardware import environment

TINY = GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=256, vocab_size=257)
MODELS = {"tiny": TINY, "124m": GPT2_124M, "345m": GPT2_345M, "774m": GPT2_774M, "1558m": GPT2_1558M}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAMBADA, ITEMS, ENDINGS = 5153, 10042, 4
FORWARD_WINDOWS = 256
HEADS = ["task", "samples", "tokens", "dtgpt s", "samples/s", "of forward", "transformers s", "times", "largest diff"]


def lambada_like(count: int, config: GPT2Config, draw: np.random.Generator) -> list[Sample]:
    """Samples with the lengths of LAMBADA: contexts of about 82 tokens, words of 1 to 3."""
    contexts = np.clip(draw.normal(82, 22, count), 20, 220).astype(int)
    words = draw.choice([1, 2, 3], count, p=[0.78, 0.17, 0.05])
    return [random_sample(c, w, config, draw) for c, w in zip(contexts, words, strict=True)]


def hellaswag_like(count: int, config: GPT2Config, draw: np.random.Generator) -> list[Sample]:
    """Samples with the lengths of HellaSwag's two sources: four endings after each context."""
    samples: list[Sample] = []
    while len(samples) < count:
        long = draw.random() < 0.68
        length = int(np.clip(draw.normal(58, 15) if long else draw.normal(25, 8), 5, 110))
        context = draw.integers(config.vocab_size, size=length).tolist()
        for _ in range(ENDINGS):
            size = int(np.clip(draw.normal(36, 8) if long else draw.normal(15, 5), 2, 60))
            ending = draw.integers(config.vocab_size, size=size).tolist()
            samples.append(fitted(context, ending, config.seq_length))
    return samples[:count]


def random_sample(context: int, target: int, config: GPT2Config, draw: np.random.Generator) -> Sample:
    ids = draw.integers(config.vocab_size, size=context + target).tolist()
    return fitted(ids[:context], ids[context:], config.seq_length)


def samples_of(args: argparse.Namespace, config: GPT2Config) -> dict[str, list[Sample]]:
    """The samples of both tasks, from files where they are given."""
    draw, found = np.random.default_rng(0), {}
    for name, path, whole, make in (
        ("lambada", args.lambada, LAMBADA, lambada_like), ("hellaswag", args.hellaswag, ITEMS * ENDINGS, hellaswag_like)
    ):  # fmt: skip
        if path is None:
            found[name] = make(args.samples or whole, config, draw)
            continue
        (asked,) = asked_for([name], [path], TaskOptions(strict=name == "lambada"))
        begin = time.perf_counter()
        found[name] = prepare(asked, make_tokenizer("gpt2", [], 0), config.seq_length)[1].samples[: args.samples]
        print(f"{path} read and encoded in {time.perf_counter() - begin:.1f} s")
    return found


@torch.no_grad()
def score_by_transformers(model: Any, samples: list[Sample], batch: int) -> list[tuple[float, bool]]:
    """The sum of log-probabilities, and whether all tokens are the likeliest, of each sample."""
    device = next(model.parameters()).device
    order = sorted(range(len(samples)), key=lambda i: -len(samples[i].ids))
    found: list[tuple[float, bool]] = [(0.0, False)] * len(samples)
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        length = len(samples[rows[0]].ids) - 1
        tokens = torch.tensor([[*samples[i].ids[:-1], *[0] * (length + 1 - len(samples[i].ids))] for i in rows])
        logprobs = F.log_softmax(model(tokens.to(device)).logits, dim=-1)
        for row, index in enumerate(rows):
            ids, context = samples[index]
            own = logprobs[row, context - 1 : len(ids) - 1]
            targets = torch.tensor(ids[context:], device=device)
            greedy = bool((own.argmax(dim=-1) == targets).all())
            found[index] = float(own.gather(1, targets[:, None]).sum()), greedy
    return found


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """The seconds of `work`, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def input_tokens(samples: list[Sample]) -> int:
    return sum(len(sample.ids) - 1 for sample in samples)


def forward_rate(scorer: Scorer, config: GPT2Config, windows: int, rounds: int) -> float:
    """Tokens per second of full windows, of which one token each is scored."""
    ids = np.random.default_rng(1).integers(config.vocab_size, size=(windows, config.seq_length + 1))
    samples = [Sample(row.tolist(), config.seq_length) for row in ids]
    scorer.score(samples)
    return input_tokens(samples) / min(
        timed(lambda: scorer.score(samples), scorer.mesh.device)[0] for _ in range(rounds)
    )


def measure(
    name: str, samples: list[Sample], scorer: Scorer, theirs: Any, forward: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Both ways on one task."""
    device = scorer.mesh.device
    part = samples[:: max(1, round(1 / args.peer_part))]  # of all lengths
    score_by_transformers(theirs, part[: 2 * args.peer_batch], args.peer_batch)
    scorer.score(samples)  # builds kernels for all shapes; also what a first call costs is printed
    ours, peers = [], []
    for _ in range(args.rounds):
        seconds, scores = timed(lambda: scorer.score(samples), device)
        ours.append(seconds)
        seconds, expected = timed(lambda: score_by_transformers(theirs, part, args.peer_batch), device)
        peers.append(seconds * input_tokens(samples) / input_tokens(part))
    own = [(one.logprob, one.all_greedy) for one in scores[:: max(1, round(1 / args.peer_part))]]
    difference = max(abs(a - b) / max(1.0, abs(b)) for (a, _), (b, _) in zip(own, expected, strict=True))
    seconds, tokens = min(ours), input_tokens(samples)
    return {
        "task": name, "samples": len(samples), "tokens": tokens, "seconds": ours, "peer_seconds": peers,
        "samples_per_second": len(samples) / seconds, "of_forward": tokens / seconds / forward,
        "times": min(peers) / seconds, "difference": difference,
    }  # fmt: skip


def row_of(result: dict[str, Any]) -> list[str]:
    return [
        result["task"], f"{result['samples']:,}", f"{result['tokens']:,}", f"{min(result['seconds']):.2f}",
        f"{result['samples_per_second']:,.0f}", f"{result['of_forward']:.0%}", f"{min(result['peer_seconds']):.2f}",
        f"{result['times']:.1f}", f"{result['difference']:.1e}",
    ]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="345m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--lambada", help="data file; none: random ids")
    parser.add_argument("--hellaswag", help="data file; none: random ids")
    parser.add_argument("--samples", type=int, help="samples of each task; none: as many as the data sets have")
    parser.add_argument("--batch_tokens", type=int, help="of dtgpt; none: its default")
    parser.add_argument("--peer_batch", type=int, default=64, help="samples of a batch of transformers")
    parser.add_argument("--peer_part", type=float, default=1.0, help="part of the samples that transformers gets")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def main() -> int:
    args = parse()
    config, device, dtype = MODELS[args.model], torch.device(args.device), DTYPES[args.dtype]
    samples = samples_of(args, config)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        theirs = transformers_model(config).to(dtype).eval()
        theirs.save_pretrained(folder)
        model = dtgpt.load(folder, "single", args.device, args.dtype)
    theirs.to(device)
    scorer = scorer_of(model, args.batch_tokens)
    first, _ = timed(lambda: scorer.score(samples["lambada"][:2000]), device)
    windows = FORWARD_WINDOWS if device.type == "cuda" else 4
    forward = forward_rate(scorer, config, windows, args.rounds)
    print(f"first call {first:.1f} s (kernels are built); forward {forward:,.0f} tokens/s")
    results = [measure(name, own, scorer, theirs, forward, args) for name, own in samples.items()]
    rows = [HEADS, *map(row_of, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for r in results:
        note(r["task"], {"s": min(r["seconds"]), "transformers / dtgpt": r["times"], "samples": r["samples"]})
    if args.json:
        found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "environment": environment(device)}
        args.json.write_text(json.dumps({**found, "forward": forward, "tasks": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
