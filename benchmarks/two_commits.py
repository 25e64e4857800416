"""Two states of the code on one machine: whether they run the same kernels in the same order, and the ratio of their
times, round by round.

    python benchmarks/two_commits.py --old FOLDER                       # a checkout of the code to compare with
    python benchmarks/two_commits.py --old FOLDER --cases bf16 decode1 --rounds 12
    python benchmarks/two_commits.py --old FOLDER --model tiny --device cpu --cases bf16 grpo --rounds 2

The processes of both stay alive and take turns; the side that begins changes from round to round. Each side uses the
recipes and scripts of its own checkout. Kernels are compared stream by stream on rank 0, losses step by step. The exit
code is 1 where kernels or losses differ, or the median of a case's ratios is above --limit.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

CASES = {  # name -> (ranks, kind of step, options)
    "bf16": (1, "train", ["single", "--precision", "bf16"]),
    "fp8": (1, "train", ["single", "--precision", "fp8"]),
    "tp2_sp": (2, "train", ["tp2_sp", "--precision", "bf16"]),
    "dp2_zero3": (2, "train", ["dp2_zero3", "--precision", "bf16"]),
    "decode1": (1, "decode", ["1"]),
    "decode64": (1, "decode", ["64"]),
    "decode256": (1, "decode", ["256"]),
    "grpo": (1, "grpo", []),
}
SAYS = "TWO_COMMITS "  # before each answer of a worker, among what libraries print
Step = Callable[[], float | None]  # returns a loss where there is one


def train_step(stack: ExitStack, args: argparse.Namespace, plan: str, *options: str) -> Step:
    """Return the step of a model under a plan."""
    from train_step import make_recipe

    from dtgpt import open_trainer  # by the name that all commits have

    asked = argparse.Namespace(model=args.model, plans=[plan], dropout=0.1, micro_batch_size=8, micro_batches=2)
    recipe, _ = make_recipe(asked, [*options, "--device", args.device], plan)
    trainer = stack.enter_context(open_trainer(recipe))
    return lambda: trainer.mean_loss(trainer.train_step())


def grpo_step(stack: ExitStack, args: argparse.Namespace) -> Step:
    """Return the step of a model that learns from its own answers."""
    from grpo import recipe_of

    from dtgpt import open_trainer  # by the name that all commits have
    from dtgpt.config.overrides import apply_overrides

    small = args.device == "cpu"
    sizes = {"prompts": 2, "group": 2, "new": 8} if small else {"prompts": 16, "group": 8, "new": 128}
    asked = argparse.Namespace(recipe=None, model="tiny_llama" if small else "llama32_1b", prompt=64, **sizes)
    trainer = stack.enter_context(open_trainer(apply_overrides(recipe_of(asked), ["--device", args.device])))
    return lambda: trainer.mean_loss(trainer.train_step())


def decode_step(stack: ExitStack, args: argparse.Namespace, batch: str) -> Step:
    """Return 64 steps of the engine with as many sequences."""
    import torch
    from decode import EnginePeer, make_engine
    from decode_models import MODELS

    config = MODELS["tiny_llama" if args.model == "tiny" else args.model]
    asked = argparse.Namespace(
        config=config, dtype="fp32" if args.device == "cpu" else "bf16", slots=None, batches=[int(batch)],
        plan="single", graph="off" if args.device == "cpu" else "on",
    )  # fmt: skip
    peer = EnginePeer(make_engine(asked, torch.device(args.device)))
    peer.prepare(torch.arange(config.seq_length // 4).remainder(config.vocab_size).tolist(), int(batch), 64)

    def step() -> None:
        peer.step_time()

    return step


def work(args: argparse.Namespace) -> None:
    """Answer the commands on stdin: `time N`, `kernels`, `end`."""
    import torch

    _, kind, options = CASES[args.work]
    cuda = args.device == "cuda"

    def drain() -> None:
        if cuda:
            torch.cuda.synchronize()

    with ExitStack() as stack:
        step = {"train": train_step, "decode": decode_step, "grpo": grpo_step}[kind](stack, args, *options)
        print(f"{SAYS}{json.dumps('ready')}", flush=True)
        for line in sys.stdin:
            name, _, count = line.strip().partition(" ")
            answer: Any = None
            if name == "end":
                break
            if name == "time":
                drain()
                begin = time.perf_counter()
                losses = [step() for _ in range(int(count))]
                drain()
                answer = (time.perf_counter() - begin) / int(count), losses
            elif cuda:
                answer = kernels(step)
            print(f"{SAYS}{json.dumps(answer)}", flush=True)
        print(f"{SAYS}{json.dumps('ended')}", flush=True)
        sys.stdout.flush()
        os._exit(0)  # the order in which two programs end does not matter


def kernels(step: Step) -> dict[str, list[str]]:
    """Return the names of the kernels of one step in the order in which each stream ran them."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    streams: dict[str, list[tuple[float, str]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams.setdefault(str(event["args"]["stream"]), []).append((event["ts"], event["name"]))
    # Numbers of streams are a matter of the process; streams are known by what they ran.
    lists = sorted(([name for _, name in sorted(found)] for found in streams.values()), key=len, reverse=True)
    return {str(place): names for place, names in enumerate(lists)}


class Side:
    """The processes that run a case with the code of one folder."""

    def __init__(self, folder: Path, case: str, args: argparse.Namespace, port: int):
        ranks, _, _ = CASES[case]
        self.workers = []
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work", case, "--model", args.model]
        command += ["--device", args.device]
        for rank in range(ranks):
            places = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "benchmarks"), *args.path])}
            if ranks > 1:
                local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
                meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                places |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), **local, **meet}
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.workers.append(subprocess.Popen(command, cwd=args.scratch, env=os.environ | places, **streams))

    def answers(self) -> Any:
        """Return what rank 0 answers, when all ranks have."""
        found = []
        for worker in self.workers:
            assert worker.stdout is not None
            told = next((line for line in worker.stdout if line.startswith(SAYS)), None)
            if told is None:
                raise SystemExit(f"a process ended with {worker.wait()}: see its error above")
            found.append(json.loads(told.removeprefix(SAYS)))
        return found[0]

    def ask(self, command: str) -> Any:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{command}\n")
            worker.stdin.flush()
        return self.answers()

    def end(self) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
            try:
                worker.wait(60)
            except subprocess.TimeoutExpired:
                worker.kill()


def compare(case: str, args: argparse.Namespace, port: int) -> dict[str, Any]:
    """Return what differs between the two sides in a case, and the ratios of their times."""
    sides = [
        Side(Path(folder).resolve(), case, args, port + place) for place, folder in enumerate((args.old, args.new))
    ]
    try:
        for side in sides:
            side.answers()
        warm = [side.ask(f"time {args.steps}")[1] for side in sides]
        times: list[list[float]] = [[], []]
        losses = warm
        for number in range(args.rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                seconds, seen = sides[place].ask(f"time {args.steps}")
                times[place].append(seconds)
                losses[place] = losses[place] + seen
        named = [side.ask("kernels") for side in sides]
    finally:
        for side in sides:
            side.end()
    ratios = [new / old for old, new in zip(*times, strict=True)]
    names = [json.dumps(each) for each in named]
    return {
        "case": case,
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "old ms": statistics.median(times[0]) * 1e3,
        "new ms": statistics.median(times[1]) * 1e3,
        "kernels": [sum(map(len, each.values())) if each else None for each in named],
        "same kernels": names[0] == names[1],
        "kernel lists": [hashlib.sha256(each.encode()).hexdigest()[:12] for each in names],
        "same losses": losses[0] == losses[1],
        "first difference": first_difference(*named) if all(named) else None,
    }


def first_difference(old: dict[str, list[str]], new: dict[str, list[str]]) -> str | None:
    """Return where the kernels of two steps part."""
    for stream in sorted(old.keys() | new.keys()):
        one, other = old.get(stream, []), new.get(stream, [])
        for place in range(max(len(one), len(other))):
            pair = [names[place][:90] if place < len(names) else None for names in (one, other)]
            if pair[0] != pair[1]:
                return f"stream {stream}, kernel {place}: {pair[0]} -> {pair[1]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="checkout of the code to compare with")
    parser.add_argument("--new", default=str(Path(__file__).resolve().parents[1]), help="checkout; default: this one")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", default="345m")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--limit", type=float, default=1.01, help="largest median ratio of times")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
    args.path = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    results = []
    with tempfile.TemporaryDirectory() as args.scratch:
        for number, case in enumerate(args.cases):
            results.append(found := compare(case, args, 29600 + 10 * number))
            print(json.dumps(found), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1))
    bad = [r for r in results if not (r["same kernels"] and r["same losses"] and r["ratio"] <= args.limit)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
