"""Several plans of one world, one after another in one process group: starting processes anew costs most of the time.

    torchrun --nproc-per-node 4 benchmarks/plans.py --model 345m --plans dp4 dp4_zero1 tp4 tp4_sp --micro_batch_size 8
    torchrun --nproc-per-node 4 benchmarks/plans.py --plans pp4 tp2_pp2 --micro_batch_size 4 --micro_batches 16

The table is that of `train_step.py`. A plan that fails ends the run; what was measured before it is printed.
"""

import argparse
import gc
import os
import sys

import torch
import torch.distributed as dist
from train_step import make_recipe, measured, result, table, timed

from dtgpt.config.execution import choose_device
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.train.startup import open_trainer
from dtgpt.util.process import Process


def measure(name: str, args: argparse.Namespace, overrides: list[str]) -> dict:
    """Of one plan, on every rank the same."""
    recipe = make_recipe(args, overrides, name)[0]
    device = choose_device(recipe.device, Process.from_environment().local_rank)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with open_trainer(recipe) as training:
        for _ in range(args.warmup):
            training.train_step()
        rounds = [timed(training.train_step, args.steps, device)]
        found = result(name, recipe, training, measured(training, rounds, args.steps), rounds)
        return found | {"loss": training.mean_loss(training.train_step())}


def main() -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="345m", help="as train_step.py takes it")
    parser.add_argument("--plans", nargs="+", required=True)
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4)
    args, overrides = parser.parse_known_args()
    process = Process.from_environment()
    recipe = make_recipe(args, overrides, args.plans[0])[0]
    started = not dist.is_initialized()
    if started:
        start_process_group(choose_device(recipe.device, process.local_rank), recipe.timeout)
    results: list[dict] = []
    try:
        for name in args.plans:
            results.append(measure(name, args, overrides))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    except Exception as error:
        print(f"{args.plans[len(results)]} failed on rank {process.rank}: {error}", file=sys.stderr, flush=True)
        show(results, process.rank)
        os._exit(1)  # peers may wait in a collective for ever
    show(results, process.rank)
    if started:
        end_process_group()
    return results


def show(results: list[dict], rank: int) -> None:
    if rank == 0 and results:
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
