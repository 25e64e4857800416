"""Context parallelism on GPUs: first `dtgpt compare` of plans with cp, then steps of long samples on one GPU and two.

    python benchmarks/context.py                                       # two GPUs: checks, then the 1B and the 8B
    python benchmarks/context.py --checks                              # checks alone
    python benchmarks/context.py --longest 32768 --steps 2             # measures of samples up to a length alone
    python benchmarks/context.py --device cpu --checks --plans cp2     # a try of this file, over gloo

A step has one sample on one GPU and on two, so that twice the tokens/s is linear. benchmarks/train_step.py measures and
says which plans do not fit. The text is that of Python's standard library, as bytes.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--model.num_layers 4 --model.dropout 0.1 --micro_batch_size 2 --global_batch_size 8 --steps 2"
DOCUMENTS = "--data.reset_attention_mask true --data.reset_position_ids true --data.eod_mask_loss true"
CHECKS = [  # recipe, options; on a GPU in the precision of training, and captured
    ("gpt2_tiny", f"{SMALL} --precision fp32"),
    ("gpt2_tiny", f"{SMALL} {DOCUMENTS}"),
    ("llama_tiny", f"{SMALL} --recompute selective"),
]
PLANS = ["cp2", "cp2_zero1", "cp2_zero3"]
MEASURES = [  # model, tokens of a sample, plans, options
    ("llama32_1b", 32_768, ["single", "cp2", "cp2_zero1"], ""),
    ("llama32_1b", 131_072, ["single", "cp2_zero3"], "--recompute around_attention"),
    ("llama3_8b", 32_768, ["cp2_zero3"], "--recompute around_attention"),
    ("llama3_8b", 32_768, ["cp2_zero3"], "--recompute around_attention --recompute_blocks 8"),
    ("llama3_8b", 32_768, ["cp2_zero3"], "--recompute full"),
    ("llama3_8b", 65_536, ["cp2_zero3"], "--recompute around_attention"),
    ("llama3_8b", 65_536, ["cp2_zero3"], "--recompute full"),
    ("llama32_1b", 1_000_000, ["cp2_zero3"], "--recompute around_attention"),
]
MINUTES = 500_000  # tokens of a sample from which on a step takes minutes: one is measured, with what it builds


def run(words: list[str]) -> bool:
    """Run a command, which prints by itself, and return whether it succeeded."""
    print(f"\n$ {shlex.join(words)}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT).returncode == 0


def check(plans: list[str], device: str) -> bool:
    """Return whether all plans follow one process."""
    done = []
    for recipe, options in CHECKS:
        words = [f"recipes/{recipe}.py", "--plans", *plans, "--device", device, *options.split()]
        done.append(run(["-m", "dtgpt", "compare", *words]))
    return all(done)


def python_sources(folder: str) -> list[str]:
    """Write the sources of Python's standard library into a folder. Returns options of a recipe that trains on them."""
    text = Path(folder) / "text.txt"
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text.write_text("".join(source.read_text(errors="replace") for source in sources))
    return ["--data.path", str(text), "--data.tokenizer", "bytes", "--data.held_out", "0"]


def measure(longest: int, steps: int) -> bool:
    """Return whether all steps could be measured."""
    common = ["benchmarks/train_step.py", "--micro_batch_size", "1", "--dropout", "0"]
    done = []
    with tempfile.TemporaryDirectory() as folder:
        data = python_sources(folder)
        for model, length, plans, options in (case for case in MEASURES if case[1] <= longest):
            words = ["--model", model, "--plans", *plans, "--model.seq_length", str(length), *options.split()]
            once = ["--steps", "0", "--warmup", "0", "--graph", "off", "--limit", "900"]
            words += once if length >= MINUTES else ["--steps", str(steps), "--warmup", "2"]
            done.append(run([*common, *data, *words]))
    return all(done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", action="store_true", help="measure nothing")
    parser.add_argument("--plans", nargs="+", default=PLANS, help="plans to check")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--longest", type=int, help="measure samples of at most so many tokens, and check nothing")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each")
    args = parser.parse_args()
    if args.longest is None and not check(args.plans, args.device):
        print("a plan is wrong: nothing is measured", file=sys.stderr)
        return 1
    return 0 if args.checks or measure(args.longest or sys.maxsize, args.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
