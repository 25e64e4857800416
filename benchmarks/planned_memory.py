"""Measure the memory of random recipes and plans on GPUs beside what `dtgpt plan` says of them.

    python benchmarks/planned_memory.py RESULTS.jsonl --cases 60           # on all GPUs of this machine
    python benchmarks/planned_memory.py RESULTS.jsonl --table              # rows and errors, from the results
    python benchmarks/planned_memory.py RESULTS.jsonl --list               # the cases, without a GPU

Models from a few million to 1.6 billion parameters, plans of one and two GPUs. A case is a run of train_step.py, whose
peak is that of the fullest rank. Several cases share a GPU: a process counts what it has allocated itself, and no time
is measured. Each result is appended to RESULTS.jsonl at once; cases that stand there are not measured again.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import Empty, Queue

import torch
from train_step import make_recipe, parse

from dtgpt.config.recipe import Settings
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.util.errors import UserError

HERE = Path(__file__).parent
MODELS = "tiny 124m 345m 774m 1558m llama_tiny llama32_1b qwen3_0_6b"
PLANS = {  # and how often each is drawn
    "single": 4, "dp2": 1, "dp2_zero1": 1, "dp2_zero2": 1, "dp2_zero3": 1, "tp2": 1, "tp2_sp": 1, "tp2_zero1": 1,
    "pp2": 1, "pp2_gpipe": 1, "pp2_interleaved": 1, "pp2_zbv": 1, "cp2": 1, "cp2_zero3": 1,
}  # fmt: skip
LEAST, MOST = 0.05, 32.0  # GiB that a case may take: two are on a GPU at once
LIMIT = 240.0  # seconds of a case
HEADS = "| options of train_step.py | measured, GiB | planned, GiB | error |\n|---|---:|---:|---:|"


def draw(generator: random.Random) -> list[str]:
    """Return options of train_step.py."""
    plan = generator.choices(list(PLANS), list(PLANS.values()))[0]
    micro_batches = "2 4 8" if plan.startswith("pp") else "1 1 2 4"
    options = {
        "model": MODELS, "micro_batch_size": "1 2 4 8 16", "micro_batches": micro_batches,
        "precision": "bf16 bf16 bf16 fp8 fp16 fp32", "dropout": "0 0 0.1", "recompute": "none none selective full",
        "optimizer.kind": "adamw muon", "model.seq_length": "256 512 1024 1024 2048 4096",
    }  # fmt: skip
    words = ["--plan", plan]
    for name, values in options.items():
        words += [f"--{name}", generator.choice(values.split())]
    return words


def settings_of(words: list[str]) -> Settings:
    """Return what the processes of a case run with."""
    args, overrides = parse(words)
    recipe, plan = make_recipe(args, overrides, *args.plans)
    return recipe.planned(plan.world)


def planned(settings: Settings) -> float:
    """Return the GiB of the fullest rank."""
    return fullest(memory_by_rank(settings)).total / 2**30


def cases(count: int, seed: int, most: int) -> list[tuple[list[str], int, float]]:
    """Return (options, GPUs, GiB planned) of cases that are allowed and fit. most: GPUs of a case."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        words = draw(generator)
        try:
            settings = settings_of(words)
            size = planned(settings)
        except UserError:
            continue
        if LEAST < size < MOST and settings.plan.world <= most:
            found.append((words, settings.plan.world, size))
    return found


def measure(words: list[str], gpus: list[str]) -> float | None:
    """Return the GiB of the fullest rank, None where the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = [sys.executable, str(HERE / "train_step.py"), *words, "--data.tokenizer", "bytes"]
        command += ["--data.held_out", "0", "--steps", "1", "--warmup", "4", "--limit", str(LIMIT)]
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        done = subprocess.run([*command, "--json", str(file)], env=own, capture_output=True, text=True)
        if done.returncode:
            print(f"failed: {' '.join(words)}\n{done.stderr[-2000:]}", flush=True)
            return None
        return json.loads(file.read_text())[0]["allocated"]


def run_all(todo: list[tuple[list[str], int]], results: Path, at_once: int) -> None:
    """Measure in turn on pairs of GPUs, `at_once` cases on each pair."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    pairs = [names.split(",")[at : at + 2] for at in range(0, len(names.split(",")), 2)]
    queue: Queue[tuple[list[str], int]] = Queue()
    for case in todo:
        queue.put(case)
    writing = threading.Lock()

    def work(pair: list[str], first: int) -> None:
        while True:
            try:
                words, world = queue.get_nowait()
            except Empty:
                return
            seen = measure(words, [pair[(first + at) % len(pair)] for at in range(world)])
            if seen is not None:
                with writing, results.open("a") as file:
                    file.write(json.dumps({"options": " ".join(words), "measured": seen}) + "\n")

    threads = [threading.Thread(target=work, args=(pair, at)) for pair in pairs for at in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def table(results: list[dict]) -> str:
    """Return rows by error, and the median and the largest."""
    rows = []
    for one in results:
        size = planned(settings_of(one["options"].split()))
        error = size / one["measured"] - 1
        rows.append((abs(error), f"| {one['options']} | {one['measured']:.2f} | {size:.2f} | {error:+.1%} |"))
    if not rows:
        return "no results"
    rows.sort()
    sizes = [size for size, _ in rows]
    summary = f"{len(sizes)} cases: median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}"
    return "\n".join([HEADS, *(row for _, row in rows), "", summary])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at_once", type=int, default=2, help="cases on a pair of GPUs")
    parser.add_argument(
        "--table", action="store_true", help="measure nothing; the present plan beside old measurements"
    )
    parser.add_argument("--list", action="store_true", help="measure nothing; print the cases")
    args = parser.parse_args()
    if args.table:
        print(table(read(args.results)))
        return
    known = {one["options"] for one in read(args.results)}
    most = min(2, torch.cuda.device_count() or 2)
    todo = [case for case in cases(args.cases, args.seed, most) if " ".join(case[0]) not in known]
    if args.list:
        print("\n".join(f"{size:6.2f} GiB  {' '.join(words)}" for words, _, size in todo))
        return
    run_all([(words, world) for words, world, _ in todo], args.results, args.at_once)
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
