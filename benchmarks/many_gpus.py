"""Whether plans are right on four or eight GPUs of one host. `all.py` checks it before it measures there.

    python benchmarks/many_gpus.py                                       # all of it, on the GPUs that are there
    python benchmarks/many_gpus.py --parts plans random                  # parts by name
    python benchmarks/many_gpus.py --gpus 4 --device cpu --parts plans   # a try of this file, over gloo

    plans     dtgpt compare of a model of 12 blocks, 100 steps, dropout 0.1, each plan beside one process
    rows      benchmarks/correctness.py for plans of four ranks, in its own file
    tests     pytest -m cuda of the folders whose tests need several GPUs
    random    dtgpt compare --random 40
    node      two torchruns of half of the GPUs each; one is killed, the other goes on by itself and ends the run

The text is that of Python's standard library, as bytes. Options that this script does not know are options of the
recipe of `plans`.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from context import ROOT, python_sources, run

PLANS = {
    4: "dp4 dp4_zero1 dp4_zero3 tp4_sp tp2_pp2 dp2_tp2_sp pp4 pp4_zbv cp4 cp2_tp2",
    8: "dp8 dp8_zero1 dp8_zero3 dp2_tp4_sp tp2_pp4 dp2_tp2_pp2 dp2_pp4_zbv dp2_cp4 cp2_tp2_pp2",
}
TRIES = {  # sizes of `plans`, by device; those of a CPU are a try
    "cuda": "recipes/gpt2_124m.py --steps 100 --precision bf16 --micro_batch_size 4 --global_batch_size 32",
    "cpu": "recipes/gpt2_tiny.py --steps 2 --precision fp32 --micro_batch_size 2 --global_batch_size 16 "
    "--model.num_layers 8 --device cpu",
}
TESTS = (
    "tests/parallel tests/ops/test_exchange.py tests/optim tests/inference tests/promises "
    "tests/planning/test_command.py"
)
INTERVAL = 5  # steps between records
NODE = f"--log.interval {INTERVAL} --checkpoint.interval 20 --micro_batch_size 2"
NODE_STEPS = {"cuda": "400", "cpu": "60"}  # a GPU does hundreds a second
KILLED_AFTER = 20  # steps
LOST = 600.0  # seconds for the run to get there, and for the rest of it
PATIENCE = 0.1  # seconds between looks at the run


def plans(args: argparse.Namespace) -> bool:
    words = [*TRIES[args.device].split(), "--model.dropout", "0.1", "--plans", *PLANS[args.gpus].split()]
    with tempfile.TemporaryDirectory() as folder:
        return run(["-m", "dtgpt", "compare", *words, *python_sources(folder), *args.options])


def rows(args: argparse.Namespace) -> bool:
    return run(["benchmarks/correctness.py", "correctness_4.jsonl", "--ranks", "4", "--device", args.device])


def tests(args: argparse.Namespace) -> bool:
    return run(["-m", "pytest", "-q", "-m", "cuda", *TESTS.split()])


def random(args: argparse.Namespace) -> bool:
    return run(["-m", "dtgpt", "compare", "recipes/gpt2_tiny.py", "--random", "40", "--device", args.device])


def node(args: argparse.Namespace) -> bool:
    """Return whether a run goes on where one of two nodes is lost, with the curve of one process."""
    half = args.gpus // 2
    with tempfile.TemporaryDirectory() as folder:
        recipe = ["recipes/gpt2_tiny.py", "--steps", NODE_STEPS[args.device], "--device", args.device, *NODE.split()]
        words = "--nnodes 1:2 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint localhost:29577 --rdzv-id 42"
        start = [*words.split(), "--nproc-per-node", str(half), "--rdzv-conf", "last_call_timeout=5,is_host="]
        lost = [*recipe, "--runs", f"{folder}/lost", "--resume", "auto", "--plan", f"dp{args.gpus} | dp{half}"]
        print(f"\n$ torchrun {shlex.join(start)}true {shlex.join(lost)}", flush=True)
        print(f"# once more with is_host=false, which is killed after step {KILLED_AFTER}", flush=True)
        nodes = (("true", 0), ("false", half))  # the node that is lost has no rendezvous
        first, second = (_torchrun([*start[:-1], start[-1] + host, *lost], range(at, at + half)) for host, at in nodes)
        try:
            metrics = Path(folder, "lost/gpt2_tiny-001/metrics.jsonl")
            _wait(lambda: metrics.exists() and metrics.read_text().count('"loss"') > KILLED_AFTER // INTERVAL)
            os.killpg(second.pid, signal.SIGKILL)
            ended = first.wait(LOST)
        finally:
            for one in (first, second):
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
        return ended == 0 and run([*recipe, "--runs", f"{folder}/whole"]) and run(
            ["-m", "dtgpt", "compare", f"{folder}/lost/gpt2_tiny-001", f"{folder}/whole/gpt2_tiny-001"]
        )  # fmt: skip


def _torchrun(words: list[str], gpus: range) -> subprocess.Popen:
    """Start a torchrun that sees these GPUs alone, in a process group of its own."""
    own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **own}, start_new_session=True)


def _wait(is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + LOST
    while not is_there():
        if time.monotonic() > end:
            raise TimeoutError(f"the run had no step {KILLED_AFTER} after {LOST:.0f} s")
        time.sleep(PATIENCE)


CHECKS = {"plans": plans, "rows": rows, "tests": tests, "random": random, "node": node}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=sorted(PLANS), default=torch.cuda.device_count() or None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", nargs="+", choices=CHECKS, default=list(CHECKS))
    args, args.options = parser.parse_known_args()
    if args.gpus not in PLANS:
        parser.error(f"this machine has {args.gpus or 'no'} GPUs; use one with 4 or 8, or --device cpu --gpus 4")
    wrong = [name for name in args.parts if not CHECKS[name](args)]
    if wrong:
        print(f"\nfailed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
