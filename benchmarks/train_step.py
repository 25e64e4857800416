"""Whole training steps under one or several plans: tokens/s, MFU, memory, host time, and how far from the floor.

    python benchmarks/train_step.py --model 345m --plans single dp2 tp2_sp --micro_batch_size 16 --dropout 0.1
    python benchmarks/train_step.py --model 345m --plan tp2_sp --against "--graph off"

One command starts the processes of each plan in turn. Options it does not know are overrides of the recipe. Every
replica takes `micro_batches` of `micro_batch_size` samples a step: dp makes the step larger, tp and pp share it.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import torch
from figures import note, ratios
from step_floor import FORWARD, floor, say_floor

from dtgpt.compare.compare import fitting_plan
from dtgpt.config.overrides import apply_overrides
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import named_kind, of_kind
from dtgpt.models.families.granitemoe import GRANITE_1B_A400M
from dtgpt.models.gpt2 import GPT2_774M, GPT2_1558M
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import environment, peak_memory
from dtgpt.util.machine.machine import peak_flops
from dtgpt.util.peers import VARIABLES

RECIPES = Path(__file__).parent.parent / "recipes"
MODELS = {  # name -> recipe file, and a model in place of the recipe's
    "tiny": ("gpt2_tiny.py", None), "124m": ("gpt2_124m.py", None), "345m": ("gpt2_345m.py", None),
    "774m": ("gpt2_345m.py", GPT2_774M), "1558m": ("gpt2_345m.py", GPT2_1558M),
    "llama_tiny": ("llama_tiny.py", None), "llama32_1b": ("llama32_1b.py", None),
    "llama3_8b": ("llama3_8b.py", None), "qwen3_0_6b": ("qwen3_0_6b.py", None),
    "granite_1b_a400m": ("olmoe_1b_7b.py", GRANITE_1B_A400M),
}  # fmt: skip
HEADS = ["plan", "GPUs", "dp x n x mb", "tokens/s", "per GPU", "of single", "MFU", "step ms", "x floor", "host ms"]
HEADS += ["GiB", "reserved", "loss"]
ROUND = 4  # timed steps of a setting before it is the other one's turn
PROFILED = 3  # steps


def make_recipe(
    args: argparse.Namespace, overrides: list[str], name: str, against: Sequence[str] = ()
) -> tuple[Recipe, ResolvedPlan]:
    """The recipe of plan `name` and that plan, dp filled in. against: overrides that replace some of the others."""
    file, model = MODELS.get(args.model, (args.model, None))
    recipe = load_recipe(RECIPES / file if args.model in MODELS else Path(file), [])
    recipe = of_kind(recipe, named_kind([*overrides, *against]))
    model = model or recipe.model
    model = replace(model, dropout=recipe.model.dropout if args.dropout is None else args.dropout)
    plan = fitting_plan(name, args.plans, recipe.plans)
    samples = args.micro_batch_size * args.micro_batches * plan.dp
    sizes = {"micro_batch_size": args.micro_batch_size, "global_batch_size": samples}
    recipe = apply_overrides(replace(recipe, model=model, plan=name, **sizes), overrides)
    recipe = apply_overrides(recipe, list(against))  # apart, since of an option that is given twice one is warned
    recipe.validate()
    return recipe, recipe.plan_for(plan.world)


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` steps back to back, behind one that is not counted and fills the queue."""
    drain(device)
    marks = []
    for _ in range(count + 1):
        step()
        marks.append(torch.cuda.Event(enable_timing=True) if device.type == "cuda" else time.perf_counter())
        if device.type == "cuda":
            marks[-1].record()
    drain(device)
    return [a.elapsed_time(b) / 1e3 if device.type == "cuda" else b - a for a, b in pairwise(marks)]


def alternating(steps: list[Callable[[], object]], count: int, device: torch.device) -> list[list[list[float]]]:
    """For each function the times of its steps, by round; several take turns, ROUND steps at a time."""
    size = count if len(steps) == 1 else ROUND
    rounds = [[timed(step, size, device) for step in steps] for _ in range(max(1, count // size))]
    return [list(times) for times in zip(*rounds, strict=True)]


def host_time(step: Callable[[], object], count: int, device: torch.device, until_done: bool = False) -> float:
    """Median of the seconds in which a step returns, or is done. The device is idle before: no full queue blocks it."""
    found = []
    for _ in range(count):
        drain(device)
        begin = time.perf_counter()
        step()
        if until_done:
            drain(device)
        found.append(time.perf_counter() - begin)
    drain(device)
    return statistics.median(found)


class Step:
    """A training step that keeps the losses of the last one."""

    def __init__(self, training: Trainer):
        self.training, self.losses = training, None

    def __call__(self) -> None:
        self.losses = self.training.train_step()

    def loss(self) -> float:
        return self.training.mean_loss(self.losses)


def work(plan: str, args: argparse.Namespace, overrides: list[str]) -> list[dict]:
    """In each process of a plan: build, warm up, measure. Every rank returns the same."""
    settings = {plan: list[str]()}
    if args.against is not None:
        settings[f"{plan} {args.against}"] = shlex.split(args.against)
    with ExitStack() as stack:
        runs = {}
        for name, against in settings.items():
            recipe = make_recipe(args, overrides, plan, against)[0]
            runs[name] = recipe, stack.enter_context(open_trainer(recipe))
        mesh, steps = runs[plan][1].mesh, [Step(training) for _, training in runs.values()]
        for step in steps:
            for _ in range(args.warmup):
                step()
        if args.steps:
            times = alternating(steps, args.steps, mesh.device)
        else:  # steps that take minutes
            times = [[[host_time(step, 1, mesh.device, until_done=True)]] for step in steps]
        results = []
        for (name, (recipe, training)), step, rounds in zip(runs.items(), steps, times, strict=True):
            results.append(result(name, recipe, training, measured(step, rounds, args.steps), rounds))
            results[-1]["loss"] = step.loss()
        if args.profile:
            profile(plan, steps[0], mesh.device, show=mesh.rank == 0)
        return results


def measured(step: Step, rounds: list[list[float]], steps: int) -> dict[str, float]:
    """Of the slowest and the fullest rank, on every rank the same: seconds of a step and of its host, GiB."""
    mesh = step.training.mesh
    device = mesh.device
    host = host_time(step, min(steps, 10), device) if steps else float("nan")
    mine = {"host": host, "allocated": peak_memory(device)}
    mine["reserved"] = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    mine["step"] = statistics.median(t for times in rounds for t in times)
    everyone = mesh.gather(mine)
    return {key: max(theirs[key] for theirs in everyone) for key in mine}


def result(name: str, recipe: Recipe, training: Trainer, measured: dict[str, float], rounds: list[list[float]]) -> dict:
    """Seconds, GiB and what follows from them. Where two settings share a process, the memory is that of both."""
    settings = training.settings
    config, plan, device = settings.model, settings.plan, settings.device
    samples, peak = settings.global_batch_size, peak_flops(device, torch.bfloat16)
    rate = samples * config.seq_length / measured["step"]
    known, bound = device.type == "cuda" and settings.dtype.itemsize == 2, None
    if known and config.architecture in FORWARD:
        bound = sum(floor(config, samples // plan.dp).values()) / (plan.tp * plan.pp)
    return measured | {
        "plan": name, "gpus": plan.world, "batch": [plan.dp, settings.micro_batches, settings.micro_batch_size],
        "tokens_per_second": rate, "per_gpu": rate / plan.world,
        "mfu": flops_per_token(config, config.seq_length) * rate / plan.world / peak if peak and known else None,
        "over_floor": measured["step"] / bound if bound else None,
        "rounds": [statistics.median(times) for times in rounds], "dtype": str(settings.dtype),
        "environment": environment(device), "recipe": asdict(recipe),
    }  # fmt: skip


def profile(name: str, step: Callable[[], object], device: torch.device, show: bool) -> None:
    """The kernels of PROFILED steps by total time; on a CPU the operators, a part of which run inside others."""
    activity = getattr(torch.profiler.ProfilerActivity, device.type.upper())
    with torch.profiler.profile(activities=[activity]) as recorded:
        for _ in range(PROFILED):
            step()
        drain(device)
    if not show:
        return
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op"):
            found[event["name"]].append(event["dur"])
    total = sum(map(sum, found.values()))
    print(f"\n{name}: {total / PROFILED:,.0f} us of kernels a step, {len(found)} kinds; us a step, share, calls a step")
    for kernel, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:40]:
        print(f"  {sum(times) / PROFILED:10.1f}{sum(times) / total:7.1%}{len(times) / PROFILED:8.1f}  {kernel[:120]}")


def launch(world: int, arguments: list[str], limit: float) -> int:
    """Run this file in `world` processes; the exit code. They are ended after `limit` seconds."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    clean = {"OMP_NUM_THREADS": "1"} | {k: v for k, v in os.environ.items() if k not in VARIABLES.values()}
    process = subprocess.Popen([sys.executable, *launcher, str(Path(__file__)), *arguments], env=clean)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit:g} s", file=sys.stderr)
        return 1
    finally:
        process.terminate()  # torchrun ends its processes; nothing happens where it is done
        process.wait()


def table(results: list[dict]) -> str:
    single = next((r["per_gpu"] for r in results if r["plan"] == "single"), None)
    rows = [HEADS]
    for r in results:
        rows.append([r["plan"], str(r["gpus"]), " x ".join(map(str, r["batch"])), f"{r['tokens_per_second']:,.0f}"])
        rows[-1] += [f"{r['per_gpu']:,.0f}", f"{r['per_gpu'] / single:.1%}" if single else "-"]
        rows[-1] += [f"{r['mfu']:.1%}" if r["mfu"] else "-", f"{r['step'] * 1e3:.2f}"]
        rows[-1] += [f"{r['over_floor']:.3f}" if r["over_floor"] else "-", f"{r['host'] * 1e3:.2f}"]
        rows[-1] += [f"{r['allocated']:.2f}", f"{r['reserved']:.2f}", f"{r['loss']:.4f}"]
    width = max(len(row[0]) for row in rows) + 2
    return "\n".join(row[0].ljust(width) + "".join(cell.rjust(12) for cell in row[1:]) for row in rows)


def hand_over(r: dict) -> None:
    """Hand the figures of a plan to all.py."""
    figures = {"tokens/s": r["tokens_per_second"], "tokens/s a GPU": r["per_gpu"], "ms": 1e3 * r["step"]}
    figures |= {"MFU %": r["mfu"] and 100 * r["mfu"], "x floor": r["over_floor"], "host ms": 1e3 * r["host"]}
    note(r["plan"], {**figures, "GiB": r["allocated"], "loss": r["loss"]}, [1e3 * each for each in r["rounds"]])


def ratio(first: list[float], second: list[float]) -> str:
    """How many times faster the first setting is, from medians by round."""
    found = ratios(first, second)
    return f"{found['ratio']:.4f} (rounds {found['lowest']:.4f} to {found['highest']:.4f})"


def parse(words: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--model", default="345m", help=f"{', '.join(MODELS)}, or the path of a recipe")
    parser.add_argument("--plan", "--plans", dest="plans", nargs="+", default=["single"], help="such as single tp2_sp")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--micro_batches", type=int, default=1, help="of each replica")
    parser.add_argument("--dropout", type=float, help="default: the recipe's")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; 0: one, which may take minutes")
    parser.add_argument("--warmup", type=int, default=6, help="steps before, which compile and capture")
    parser.add_argument("--against", help="overrides of a second setting, which takes turns with the first")
    parser.add_argument("--profile", action="store_true", help="then the 40 kernels that take most")
    parser.add_argument("--floor", action="store_true", help="show the account of the floor and measure nothing")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one plan may take")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)  # in the processes of a plan: its name, a file
    return parser.parse_known_args(words)


def compare(args: argparse.Namespace, overrides: list[str]) -> int:
    """Every plan in turn, then the table; the exit code."""
    results, failed = [], []
    plans = {name: make_recipe(args, overrides, name) for name in dict.fromkeys(args.plans)}
    if args.floor:
        for recipe, plan in plans.values():
            say_floor(recipe.model, recipe.global_batch_size // plan.dp)
        return 0
    for name, (_, plan) in plans.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.json"
            code = launch(plan.world, [*sys.argv[1:], "--only", name, str(file)], args.limit)
            results += json.loads(file.read_text()) if code == 0 else []
            failed += [name] if code else []
    print("\n" + table(results))
    for r in results:
        hand_over(r)
    if args.against is not None:
        for a, b in zip(results[::2], results[1::2], strict=True):
            print(f"{a['plan']} is {ratio(a['rounds'], b['rounds'])} x as fast as {b['plan']}")
            note(f"{a['plan']} / {b['plan']}", ratios(a["rounds"], b["rounds"]))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    for name in failed:
        print(f"plan {name} failed; see above", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    args, overrides = parse()
    try:
        if not args.only:
            return compare(args, overrides)
        plan, file = args.only
        results = work(plan, args, overrides)
        if os.environ.get("RANK", "0") == "0":
            Path(file).write_text(json.dumps(results, default=repr))
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo may outlive its group and abort a process that Python takes apart
