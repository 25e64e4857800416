"""Saving and loading a checkpoint with its optimizer: ours, torch.save of the same tensors, and plain DCP.

    python benchmarks/checkpoint.py --model 345m --folder /tmp/checkpoints
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --model 345m --plan zero1      (without torch.save)

"stall" is what training loses: on a GPU the time that steps take longer where a save falls among them; on a CPU how
long the save and then the update keep it waiting, a backward pass later. Ours writes to the disk and syncs, with a
digest, and verifies every file when it loads; torch.save and DCP do neither. All read from the page cache, in which the
files still are. Options it does not know are overrides of the recipe.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from train_step import drain, make_recipe

from dtgpt.begin import read_on_every_node, start
from dtgpt.checkpoint.folder import MOMENTS, Checkpoint, step_folder
from dtgpt.checkpoint.load import load_training
from dtgpt.checkpoint.save import Saver
from dtgpt.checkpoint.state import describe
from dtgpt.signals import StopRequest
from dtgpt.train import Training

STEPS = 12  # in which the stall of a save is looked for, on a GPU


def tensors_of(training: Training) -> dict[str, Tensor]:
    """Weights and moments of this rank."""
    adamw = training.optimizer.adamw
    weights = {shard.name: shard.local for shard in training.shards}
    moments = {f"{s.name}.{m}": getattr(adamw, m)[s.index] for m in MOMENTS for s in training.shards}
    return weights | moments


def seconds(work: Callable[[], object], device: torch.device) -> float:
    drain(device)
    begin = time.perf_counter()
    work()
    drain(device)
    return time.perf_counter() - begin


def medians(times: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(t[name] for t in times) for name in times[0]}


def ours(training: Training, saver: Saver, step: int, at_once: bool) -> dict[str, float]:
    state = describe(training.recipe, training.mesh, step, 0, "") | training.optimizer.state() | {"updates": step}
    begin = time.perf_counter()
    saver.save(step, state)
    if training.device.type == "cuda":
        stall = added_to_steps(training, begin)
    else:
        stall = time.perf_counter() - begin
        if not at_once:
            training.gradients()  # beside which the copy is made
        waiting = time.perf_counter()
        saver.before_update()
        stall += time.perf_counter() - waiting
    saver.wait()
    training.mesh.gather(None)  # rank 0 is the last
    total = time.perf_counter() - begin  # on a CPU beside a pass that takes both cores
    return {"stall": stall, "total": total, "load": load_ours(training, saver.checkpoints, step)}


def added_to_steps(training: Training, begin: float) -> float:
    """Steps queued behind a save, against as many without one."""
    times = []
    for start_of in (begin, None):
        drain(training.device) if start_of is None else None
        start_of = start_of or time.perf_counter()
        for _ in range(STEPS):
            training.train_step()
        drain(training.device)
        times.append(time.perf_counter() - start_of)
    return times[0] - times[1]


def load_ours(training: Training, checkpoints: Path, step: int) -> float:
    def load() -> None:
        mesh = training.mesh
        checkpoint = Checkpoint(step_folder(checkpoints, step))
        problems = [p for p in mesh.gather(checkpoint.problem(mesh.rank, mesh.world)) if p]
        if problems:
            raise RuntimeError(problems[0])
        load_training(checkpoint, training.shards, training.optimizer.adamw)

    return seconds(load, training.device)


def torch_save(training: Training, folder: Path) -> dict[str, float]:
    tensors, file = tensors_of(training), folder / "state.pt"
    total = seconds(lambda: torch.save(tensors, file), training.device)

    def load() -> None:
        for name, tensor in torch.load(file, map_location="cpu", weights_only=True).items():
            tensors[name].copy_(tensor)

    return {"stall": total, "total": total, "load": seconds(load, training.device)}


def plain_dcp(training: Training, folder: Path) -> dict[str, float]:
    """Of this rank's tensors: DCP wants names that no other rank has."""
    tensors = {f"{training.mesh.rank}.{name}": tensor for name, tensor in tensors_of(training).items()}
    place = folder / "dcp"
    total = seconds(lambda: dcp.save(tensors, checkpoint_id=place), training.device)
    load = seconds(lambda: dcp.load(tensors, checkpoint_id=place), training.device)
    return {"stall": total, "total": total, "load": load}


def measure(args: argparse.Namespace, overrides: list[str]) -> None:
    folder = Path(args.folder)
    with ExitStack() as stack:
        recipe, mesh, process = start(make_recipe(args, overrides, args.plan)[0], stack)
        training = Training(recipe, mesh, read_on_every_node(recipe, mesh, process), None, StopRequest())
        for moment in MOMENTS:
            for tensor in getattr(training.optimizer.adamw, moment):
                tensor.uniform_()
        saver = stack.enter_context(Saver(folder / "ours", training.shards, training.optimizer.adamw, keep_last=1))
        for _ in range(args.warmup):
            training.train_step()
        rows: dict[str, list[dict[str, float]]] = {}
        for turn in range(args.rounds + 1):  # the first one takes memory, and is not counted
            for name, work in {
                "dtgpt": lambda turn=turn: ours(training, saver, turn + 1, args.at_once),
                "torch.save": lambda: torch_save(training, folder),
                "DCP": lambda: plain_dcp(training, folder),
            }.items():
                if mesh.world > 1 and name == "torch.save":
                    continue
                found = work()
                if turn:
                    rows.setdefault(name, []).append(found)
                if mesh.world > 1:
                    dist.barrier()
                if mesh.rank == 0:
                    shutil.rmtree(folder / "dcp", ignore_errors=True)
        size = mesh.sum(sum(t.nbytes for t in tensors_of(training).values())).item()
        if mesh.rank == 0:
            show(rows, size, args)
            shutil.rmtree(folder)


def show(rows: dict[str, list[dict[str, float]]], size: float, args: argparse.Namespace) -> None:
    print(f"{args.model}, {args.plan}: {size / 1e9:.2f} GB held by all ranks; seconds, median of {args.rounds}")
    print(f"{'':<12}{'stall':>10}{'total':>10}{'load':>10}{'GB/s saved':>12}{'GB/s loaded':>13}")
    for name, times in rows.items():
        t = medians(times)
        figures = "".join(f"{t[kind]:10.3f}" for kind in ("stall", "total", "load"))
        print(f"{name:<12}{figures}{size / 1e9 / t['total']:12.2f}{size / 1e9 / t['load']:13.2f}")
    mine, peer = medians(rows["dtgpt"]), medians(rows.get("torch.save", rows["DCP"]))
    stall, load = mine["stall"] / peer["total"], mine["load"] / peer["load"]
    print(f"dtgpt against {'torch.save' if 'torch.save' in rows else 'DCP'}: stall {stall:.1%}, load {load:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="345m", help="as train_step.py takes it")
    parser.add_argument("--plan", default="single")
    parser.add_argument("--folder", default="/tmp/dtgpt-checkpoints", help="made, and removed at the end")
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4 * torch.cuda.is_available(), help="steps before")
    parser.add_argument("--at_once", action="store_true", help="on a CPU: no pass before the update")
    args, overrides = parser.parse_known_args()
    args.plans = [args.plan]
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    measure(args, overrides)


if __name__ == "__main__":
    main()
