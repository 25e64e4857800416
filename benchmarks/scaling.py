"""How far replicas are from linear: one GPU and several plans in turns, all of them open in the same processes.

    torchrun --nproc-per-node 2 benchmarks/scaling.py --plans dp2 zero1 zero3 --micro_batch_size 32
    torchrun --nproc-per-node 2 benchmarks/scaling.py --plans dp2 --nccl

Every replica takes one micro-batch a step. A turn of one GPU runs on all GPUs at once, each for itself: a GPU that is
warm, or beside a busy one, is slower. The time of a turn is that of the slowest rank, since no plan can be faster than
its slowest GPU; `ranks` are the medians of each. `--nccl` runs each plan once more without shared memory.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from figures import note
from train_step import make_recipe, timed

from dtgpt.config.execution import choose_device
from dtgpt.parallel import mesh
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.shared_memory.arena import SWITCH
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import StepResult
from dtgpt.util.peers import VARIABLES, Process

WARM_UP = 5  # steps, within which a step is captured


@contextmanager
def alone() -> Iterator[None]:
    """Be the only process of a run, on this rank's GPU."""
    with mock.patch.dict(os.environ, {VARIABLES["rank"]: "0", VARIABLES["world"]: "1"}):
        yield


def open_step(name: str, args: argparse.Namespace, overrides: list[str], stack: ExitStack) -> Callable[[], StepResult]:
    """Return the captured step of a plan, `NAME nccl` without shared memory."""
    plan, _, how = name.partition(" ")
    with alone() if plan == "single" else mock.patch.dict(os.environ, {SWITCH: "0"} if how else {}):
        step = stack.enter_context(open_trainer(make_recipe(args, overrides, plan)[0])).train_step
    for _ in range(WARM_UP):
        step()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of steps before the capture; graphs keep theirs
    return step


def in_turns(
    steps: dict[str, Callable[[], StepResult]], args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Print the milliseconds of each, by round. Returns the median share of linear, the same on every rank."""
    end = time.monotonic() + args.warm
    while time.monotonic() < end:
        timed(steps["single"], args.steps, device)
    mine = {name: [0.0] * args.rounds for name in steps}
    for turn in range(args.rounds):
        for name, step in steps.items():
            mine[name][turn] = 1e3 * statistics.median(timed(step, args.steps, device))
    everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=mesh.messages)
    shares = {}
    for name in steps:
        times = [max(turn) for turn in zip(*(one[name] for one in everyone), strict=True)]
        single = [max(turn) for turn in zip(*(one["single"] for one in everyone), strict=True)]
        shares[name] = statistics.median(a / b for a, b in zip(single, times, strict=True))
        if dist.get_rank() == 0:
            rounds = " ".join(f"{t:.2f}" for t in times)
            ranks = " ".join(f"{statistics.median(one[name]):.2f}" for one in everyone)
            found = f"{statistics.median(times):8.2f} ms, {shares[name]:.4f} of linear"
            note(name, {"ms": statistics.median(times), "of linear": shares[name]}, times)
            print(f"{name:12} {found}; ranks {ranks}; rounds {rounds}", flush=True)
    return shares


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="345m", help="as train_step.py takes it")
    parser.add_argument("--plans", nargs="+", required=True)
    parser.add_argument("--nccl", action="store_true", help="each plan also by NCCL alone")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=float, default=4.0, help="seconds of steps before the first turn")
    args, overrides = parser.parse_known_args()
    args.micro_batches = 1
    recipe = make_recipe(args, overrides, args.plans[0])[0]
    device = choose_device(recipe.device, Process.from_environment().local_rank)
    started = not dist.is_initialized()
    if started:
        start_process_group(device, recipe.timeout)
    names = ["single", *args.plans, *(f"{plan} nccl" for plan in args.plans if args.nccl)]
    with ExitStack() as stack:
        shares = in_turns({name: open_step(name, args, overrides, stack) for name in names}, args, device)
    if started:
        end_process_group()
    return shares


if __name__ == "__main__":
    main()
