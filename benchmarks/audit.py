"""Audits of random steps under random other plans, planted alterations, and what receipts cost a step.

    python benchmarks/audit.py --cases 100                          # gloo, fp32 and bf16, a tiny model
    python benchmarks/audit.py --cases 20 --on-gpus                 # two GPUs, and one that computes their steps again
    python benchmarks/audit.py --alterations                        # each is found, named and located
    python benchmarks/audit.py --cost [--nproc 2] [--rounds 12]     # the 345M, 16 samples: steps with and without
    python benchmarks/audit.py --alter RUN                          # change a weight of the newest checkpoint

The exit code is 1 where a case is not equal, or an alteration is not found.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.receipts import audit as auditing
from dtgpt.receipts.audit import audit
from tests.support.altered_runs import ALTERATIONS, WEIGHT, change
from tests.support.audits import audited, tiny, train_with_receipts

ROOT = Path(__file__).resolve().parents[1]
PLANS = {"single": 1, "dp2": 2, "zero1": 2, "zero2": 2, "zero3": 2, "pp2": 2}
STEPS = 8


def run_cases(count: int, seed: int) -> int:
    """Audit random steps of runs of each plan and precision under random other plans; return how many are not equal."""
    draw, wrong = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        recipe = tiny(Path(folder))
        runs = {}
        for number in range(count):
            precision, plan = draw.choice(["fp32", "bf16"]), draw.choice(list(PLANS))
            if (plan, precision) not in runs:
                options = {"parts": 3, "reduce": "exact", "precision": precision}
                runs[plan, precision] = train_with_receipts(recipe, STEPS, plan, PLANS[plan], **options)
            step, other = draw.randint(3, STEPS), draw.choice([name for name in PLANS if name != plan])
            steps = draw.randint(1, STEPS - step + 1)
            found = audit(runs[plan, precision], step, steps, other, None, None)["steps"]
            wrong += found["verdict"] != "equal"
            print(
                f"{number + 1}: {plan} {precision}, steps {step} to {found['last']} under {other}: {found['verdict']}"
            )
    print(f"{count - wrong} of {count} equal")
    return wrong


def run_cases_on_gpus(count: int, seed: int, device: str) -> int:
    """Let one GPU compute random steps of runs on two again, four at a time; return how many are not equal."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        tiny(Path(folder))  # its text
        recipe = Path(folder) / "tiny.py"
        recipe.write_text(
            "from pathlib import Path\nfrom tests.support.audits import tiny\n\n"
            f"def recipe():\n    return tiny(Path({folder!r}))\n"
        )
        runs = {}
        for plan, precision in (("dp2", "bf16"), ("zero2", "fp32"), ("pp2", "bf16"), ("zero3", "bf16")):
            words = f"--nproc 2 --plan {plan} --precision {precision} --device {device} --steps {STEPS} --reduce exact"
            words += f" --attention explicit --runs {folder}/{plan} --receipts.on --receipts.parts 3 --log.interval 1"
            words += " --log.eval_interval 0 --log.sample_tokens 0 --checkpoint.interval 2 --checkpoint.keep_last 0"
            done = program("train", str(recipe), *words.split())
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            (runs[plan],) = Path(folder, plan).iterdir()

        def compute_again(case: tuple[str, int]) -> str:
            plan, step = case
            done = program("audit", str(runs[plan]), "--step", str(step))
            return f"{plan}, step {step} on one: {(done.stdout + done.stderr).splitlines()[-1]}"

        cases = [(draw.choice(list(runs)), draw.randint(3, STEPS)) for _ in range(count)]
        equal = 0
        with ThreadPoolExecutor(4) as pool:
            for told in pool.map(compute_again, cases):
                print(told, flush=True)  # at once: the whole takes minutes
                equal += ": equal: " in told
    print(f"{equal} of {count} equal")
    return count - equal


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `dtgpt` with these words."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dtgpt", *words]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


def run_alterations() -> int:
    """Alter a run in each way, and return how many alterations are not found, named and located."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in (("run", 1), ("other", 2)):
            base = replace(tiny(Path(folder)), seed=seed, runs=f"{folder}/{name}")
            train_with_receipts(base, STEPS, parts=1, reduce="exact").rename(Path(folder) / f"{name}-run")
        for name, altered in ALTERATIONS.items():
            for each in ("run", "other"):
                shutil.rmtree(Path(folder) / each, ignore_errors=True)
                shutil.copytree(Path(folder) / f"{each}-run", Path(folder) / each)
            run = Path(folder) / "run"
            altered.work(run)
            if altered.step_to_audit is None:
                found = audit(run, None, 1, "single", None, None)["problems"]
            else:
                found = [audit(run, altered.step_to_audit, 1, "dp2", None, None)["steps"]["first_difference"]]
            same = [one for one in found if one and (one["kind"], one["step"]) == (altered.kind, altered.step)]
            is_found = any(altered.named in one["said"] for one in same)
            missed += not is_found
            print(f"{'found' if is_found else 'MISSED'}: {name}")
    print(f"{len(ALTERATIONS) - missed} of {len(ALTERATIONS)} found, named and located")
    return missed


def seconds_of_step(nproc: int, steps: int, words: list[str]) -> float:
    """Return the seconds of a step of the 345M in a run of its own, without the first steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dtgpt", "train", "recipes/gpt2_345m.py", "--nproc", str(nproc)]
        command += f"--micro_batch_size {16 // nproc} --global_batch_size 16 --steps {steps}".split()
        command += f"--log.interval {steps // 2} --log.eval_interval 0 --log.sample_tokens 0 --runs {folder}".split()
        command += ["--checkpoint.interval", "0", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        (run,) = Path(folder).iterdir()
        if words:
            start = json.loads((run / "receipts.jsonl").open().readline())
            print(f"  {start['bytes_a_step'] / 1e6:,.0f} MB read a step by rank 0, at most")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return next(r["seconds_per_step"] for r in records if r["step"] == steps and "seconds_per_step" in r)


def measure_cost(nproc: int, rounds: int, steps: int) -> None:
    """Print the median of the ratio of steps with receipts to steps without, in interleaved rounds."""
    ratios = []
    for number in range(rounds):
        pair = {}
        for words in ([], ["--receipts.on"])[:: 1 if number % 2 else -1]:
            pair[bool(words)] = seconds_of_step(nproc, steps, words)
        ratios.append(pair[True] / pair[False])
        print(f"round {number + 1}: {1e3 * pair[False]:.2f} ms, with receipts {1e3 * pair[True]:.2f} ms", flush=True)
    print(f"median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--cases", type=int, metavar="N", help="random audits")
    ways.add_argument("--alterations", action="store_true", help="planted alterations")
    ways.add_argument("--cost", action="store_true", help="what receipts cost a step of the 345M")
    ways.add_argument("--alter", type=Path, metavar="RUN", help="change a weight of the newest checkpoint")
    parser.add_argument("--on-gpus", action="store_true", help="--cases: of runs on two GPUs, on one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="with --on-gpus; cpu: a trial of it")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs of --cost")
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds of --cost")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run of --cost")
    parser.add_argument("--seed", type=int, default=1, help="of --cases")
    options = parser.parse_args()
    begin = time.time()
    wrong = 0
    if options.alter:
        newest = list_checkpoints(options.alter / "checkpoints")[-1]
        change(options.alter, step_of(newest), WEIGHT)
    elif options.cost:
        measure_cost(options.nproc, options.rounds, options.steps)
    else:
        auditing.start_processes = audited  # forks, which begin at once
        if options.alterations:
            wrong = run_alterations()
        elif options.on_gpus:
            wrong = run_cases_on_gpus(options.cases, options.seed, options.device)
        else:
            wrong = run_cases(options.cases, options.seed)
    print(f"{time.time() - begin:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
