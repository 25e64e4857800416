"""Audits of random steps under random other plans, planted alterations, and what receipts cost a step.

    python benchmarks/audit.py --cases 100                          # gloo, fp32 and bf16, a tiny model
    python benchmarks/audit.py --cases 20 --on-gpus                 # two GPUs, and one that computes their steps again
    python benchmarks/audit.py --alterations                        # each is found, named and located
    python benchmarks/audit.py --cost [--rounds 12]                 # steps with and without receipts, in turns
    torchrun --nproc-per-node 2 benchmarks/audit.py --cost --plan dp2 --micro_batch_size 8
    python benchmarks/audit.py --one                                # seconds of an audit of one step
    python benchmarks/audit.py --alter RUN                          # change a weight of the newest checkpoint

--cost and --one take options of their recipe, the 345M's with 16 samples a step, or --recipe. The exit code is 1 where
a case is not equal, or an alteration is not found.
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
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from figures import note, ratios
from train_step import drain

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.receipts import audit as auditing
from dtgpt.receipts.audit import audit
from dtgpt.receipts.observer import ReceiptObserver
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe
from dtgpt.train.trainer import Trainer
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


def measure_cost(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print the ratio of the seconds of steps with receipts to those of steps without, both runs open in this process,
    in turns. Lines are collected where a run would wait for the device to report progress."""
    with ExitStack() as stack:
        works = {}
        for name, words in (("without", []), ("with", ["--receipts.on"])):
            recipe = load_recipe(ROOT / options.recipe, [*overrides, *words])
            trainer = stack.enter_context(open_trainer(recipe))
            observer = ReceiptObserver(recipe.log.interval, recipe.num_steps)
            observer.prepare(trainer)
            works[name] = partial(seconds_of_steps, trainer, observer, options.steps)
        rank = trainer.mesh.rank
        for work in works.values():
            work()  # compiles and captures
        times: dict[str, list[float]] = {name: [] for name in works}
        for number in range(options.rounds):
            for name in list(works)[:: 1 if number % 2 else -1]:
                times[name].append(works[name]())
        found = ratios(times["without"], times["with"])
    if rank == 0:
        for name, rounds in times.items():
            print(f"{name:8}{1e3 * statistics.median(rounds):9.3f} ms a step")
            note(name, {"ms": 1e3 * statistics.median(rounds)}, [1e3 * each for each in rounds])
        print(f"with / without {found['ratio']:.4f}, {found['lowest']:.4f} to {found['highest']:.4f}")
        note("with / without", found)


def seconds_of_steps(trainer: Trainer, observer: ReceiptObserver, steps: int) -> float:
    """Return the seconds of a step, of `steps`, with what a run does at its end to report progress."""
    device = trainer.mesh.device
    drain(device)
    begin = time.perf_counter()
    for _ in range(steps):
        result = trainer.train_step()
    trainer.mean_loss(result)  # waits for the device
    if observer.state is not None:
        observer.state.collect()
    drain(device)
    return trainer.mesh.max((time.perf_counter() - begin) / steps)


def measure_audit(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print how long an audit of a step takes, whose run is made first; return whether its bits are not equal."""
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"{options.recipe} --steps 12 --checkpoint.interval 8 --receipts.on --log.interval 1 --runs {folder}/runs"
        )
        quiet = "--log.eval_interval 0 --log.sample_tokens 0 --checkpoint.keep_last 0"
        done = program("train", *words.split(), *quiet.split(), *overrides)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        (run,) = Path(folder, "runs").iterdir()
        begin = time.perf_counter()
        done = program("audit", str(run), "--step", "10", "--json", f"{folder}/audit.json")
        seconds = time.perf_counter() - begin
        print(done.stdout + done.stderr)
        verdict = json.loads(Path(folder, "audit.json").read_text())["steps"]["verdict"]
    print(f"{verdict}, {seconds:.1f} s from the start of the audit to its end")
    note("audit of a step", {"s": seconds, "verdict": verdict})
    return int(verdict != "equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--cases", type=int, metavar="N", help="random audits")
    ways.add_argument("--alterations", action="store_true", help="planted alterations")
    ways.add_argument("--cost", action="store_true", help="what receipts cost a step")
    ways.add_argument("--one", action="store_true", help="seconds of an audit of one step")
    ways.add_argument("--alter", type=Path, metavar="RUN", help="change a weight of the newest checkpoint")
    parser.add_argument("--on-gpus", action="store_true", help="--cases: of runs on two GPUs, on one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="with --on-gpus; cpu: a trial of it")
    parser.add_argument("--recipe", default="recipes/gpt2_345m.py", help="of --cost and --one")
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds of --cost")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn of --cost")
    parser.add_argument("--seed", type=int, default=1, help="of --cases")
    options, overrides = parser.parse_known_args()
    if overrides and not (options.cost or options.one):
        parser.error(f"there is no option {overrides[0]}")
    for name in ("--global_batch_size", "--micro_batch_size"):
        overrides = overrides if name in overrides else [name, "16", *overrides]
    begin = time.time()
    wrong = 0
    if options.alter:
        newest = list_checkpoints(options.alter / "checkpoints")[-1]
        change(options.alter, step_of(newest), WEIGHT)
    elif options.cost:
        measure_cost(options, overrides)
    elif options.one:
        wrong = measure_audit(options, overrides)
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
