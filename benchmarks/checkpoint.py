"""Saving and loading a checkpoint with its optimizer: ours, torch.save of the same tensors, DCP and asynchronous DCP.

    python benchmarks/checkpoint.py --model 345m --folder /tmp/checkpoints
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --model 345m --plan zero1      (without torch.save)

"stall" is the time until training may go on. On a GPU: what steps take longer where a save falls among them, the first
update of which waits until the weights are copied. On a CPU: how long the call and then the update keep it waiting, a
backward pass later. torch.save and dcp.save are synchronous: their stall is their total. dcp.async_save stages into
memory that is pinned (on a GPU) and kept from save to save, and writes in a thread or, with --dcp process, in another
process. "total" is the time until the checkpoint is whole. Ours and DCP sync their files, torch.save does not; ours
alone has digests, and verifies every file when it loads. All read from the page cache, in which the files still are.
Options it does not know are overrides of the recipe.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import note
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from train_step import drain, make_recipe

from dtgpt.checkpoint.load import load_training
from dtgpt.checkpoint.manifest import Checkpoint, step_folder
from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.train.checkpoints import state_of
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer

OURS = "dtgpt, background"
STEPS = 12  # in which the stall of a save is looked for, on a GPU


def tensors_of(training: Trainer) -> dict[str, Tensor]:
    """Weights and moments of this rank."""
    rule = training.optimizer.rule
    weights = {shard.name: shard.local for shard in training.shards}
    moments = {f"{s.name}.{name}": t for s in training.shards for name, t in rule.state(s.index).items()}
    return weights | moments


def seconds(work: Callable[[], object], device: torch.device) -> float:
    drain(device)
    begin = time.perf_counter()
    work()
    drain(device)
    return time.perf_counter() - begin


def medians(times: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(t[name] for t in times) for name in times[0]}


class Way(NamedTuple):
    """How a checkpoint is saved beside training. `before_update` may be called at any time after `save`."""

    save: Callable[[], object]
    before_update: Callable[[], object]  # returns when weights and moments may change, or makes the stream wait
    finish: Callable[[], object]  # returns when this rank's part is on the disk


def stall_and_total(training: Trainer, way: Way, at_once: bool) -> dict[str, float]:
    cuda = training.mesh.device.type == "cuda"
    without = seconds(lambda: steps(training), training.mesh.device) if cuda else 0.0
    begin = time.perf_counter()
    way.save()
    if cuda:
        unsaved, training.before_update = training.before_update, way.before_update
        steps(training)
        drain(training.mesh.device)
        training.before_update = unsaved
        stall = time.perf_counter() - begin - without
    else:
        stall = time.perf_counter() - begin
        if not at_once:
            training.gradients()  # beside which the copy is made
        waiting = time.perf_counter()
        way.before_update()
        stall += time.perf_counter() - waiting
    way.finish()
    training.mesh.gather(None)  # the last rank
    return {"stall": stall, "total": time.perf_counter() - begin}  # beside steps or a pass, which take their share


def steps(training: Trainer) -> None:
    for _ in range(STEPS):
        training.train_step()


def ours(recipe: Recipe, training: Trainer, saver: Saver, step: int, at_once: bool) -> dict[str, float]:
    state = state_of(training, asdict(recipe)) | {"step": step, "updates": step}
    way = Way(lambda: saver.save(step, state), saver.before_update, saver.wait)
    times = stall_and_total(training, way, at_once)
    return times | {"load": load_ours(training, saver.checkpoints, step)}


def load_ours(training: Trainer, checkpoints: Path, step: int) -> float:
    def load() -> None:
        mesh = training.mesh
        checkpoint = Checkpoint(step_folder(checkpoints, step))
        problems = [p for p in mesh.gather(checkpoint.problem(mesh.rank, mesh.world)) if p]
        if problems:
            raise RuntimeError(problems[0])
        load_training(checkpoint, training.shards, training.optimizer.rule)

    return seconds(load, training.mesh.device)


def torch_save(training: Trainer, folder: Path) -> dict[str, float]:
    tensors, file = tensors_of(training), folder / "state.pt"
    total = seconds(lambda: torch.save(tensors, file), training.mesh.device)

    def load() -> None:
        for name, tensor in torch.load(file, map_location="cpu", weights_only=True).items():
            tensors[name].copy_(tensor)

    return {"stall": total, "total": total, "load": seconds(load, training.mesh.device)}


class Dcp:
    """torch.distributed.checkpoint of this rank's tensors, under names that no other rank has."""

    def __init__(self, training: Trainer, folder: Path, kind: str):
        self.training, self.place, self.kind = training, folder / "dcp", kind
        cuda = training.mesh.device.type == "cuda"
        if kind == "process" and not dist.is_initialized():  # it wants to know its rank
            os.environ.setdefault("MASTER_ADDR", "localhost")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # A group of its own: its collectives run in a thread, beside those of training.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        options = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=cuda, use_async_staging=True, use_non_blocking_copy=cuda
        )
        self.stager = DefaultStager(options)
        # torch 2.11 empties the stager after a save, so that the next one fails. Later versions keep its memory.
        self.stager._state_dict_stager.close = lambda: None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"{self.training.mesh.rank}.{name}": tensor for name, tensor in tensors_of(self.training).items()}

    def synchronous(self) -> dict[str, float]:
        where = {"checkpoint_id": self.place, "process_group": self.group}
        total = seconds(lambda: dcp.save(self.tensors, **where), self.training.mesh.device)
        return {"stall": total, "total": total, "load": self._load()}

    def asynchronous(self, at_once: bool) -> dict[str, float]:
        kind = AsyncCheckpointerType(self.kind)
        where = {"checkpoint_id": self.place, "process_group": self.group}
        response = None

        def save() -> None:
            nonlocal response
            response = dcp.async_save(self.tensors, **where, async_checkpointer_type=kind, async_stager=self.stager)

        way = Way(save, lambda: response.staging_completion.result(), lambda: response.upload_completion.result())
        return stall_and_total(self.training, way, at_once) | {"load": self._load()}

    def _load(self) -> float:
        where = {"checkpoint_id": self.place, "process_group": self.group}
        return seconds(lambda: dcp.load(self.tensors, **where), self.training.mesh.device)

    def close(self) -> None:
        self.stager.close()
        if self.kind == "process" and self.training.mesh.world == 1:
            dist.destroy_process_group()


def measure(args: argparse.Namespace, overrides: list[str]) -> None:
    folder = Path(args.folder)
    with ExitStack() as stack:
        recipe = make_recipe(args, overrides, args.plan)[0]
        training = stack.enter_context(open_trainer(recipe))
        mesh = training.mesh
        for shard in training.shards:
            for tensor in training.optimizer.rule.state(shard.index).values():
                tensor.uniform_()
        saver = stack.enter_context(Saver(folder / "ours", training.shards, training.optimizer.rule, keep_last=1))
        for _ in range(args.warmup):
            training.train_step()
        peer = Dcp(training, folder, args.dcp)
        stack.callback(peer.close)
        ways = {
            OURS: lambda turn: ours(recipe, training, saver, turn + 1, args.at_once),
            "torch.save, sync": lambda _: torch_save(training, folder),
            "DCP, sync": lambda _: peer.synchronous(),
            f"DCP, async {args.dcp}": lambda _: peer.asynchronous(args.at_once),
        }
        if mesh.world > 1:
            del ways["torch.save, sync"]
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(args.rounds + 1):  # the first one takes memory, and is not counted
            for name, work in ways.items():
                found = work(turn)
                rows[name] += [found] if turn else []
                mesh.gather(None)
                if mesh.rank == 0:
                    shutil.rmtree(folder / "dcp", ignore_errors=True)
                mesh.gather(None)
        size = mesh.sum(sum(t.nbytes for t in tensors_of(training).values())).item()
        if mesh.rank == 0:
            show(rows, size, args)
            shutil.rmtree(folder)


def show(rows: dict[str, list[dict[str, float]]], size: float, args: argparse.Namespace) -> None:
    print(f"{args.model}, {args.plan}: {size / 1e9:.2f} GB held by all ranks; seconds, median of {args.rounds}")
    print(f"{'':<20}{'stall':>10}{'total':>10}{'load':>10}{'GB/s saved':>12}{'GB/s loaded':>13}")
    times = {name: medians(found) for name, found in rows.items()}
    for name, t in times.items():
        note(name, {**{f"{kind} s": t[kind] for kind in ("stall", "total", "load")}, "GB": size / 1e9})
        figures = "".join(f"{t[kind]:10.3f}" for kind in ("stall", "total", "load"))
        print(f"{name:<20}{figures}{size / 1e9 / t['total']:12.2f}{size / 1e9 / t['load']:13.2f}")
    mine, (name, peer) = times[OURS], list(times.items())[-1]
    ratios = ", ".join(f"{kind} {mine[kind] / peer[kind]:.2f}" for kind in ("total", "load"))
    print(f"{OURS} against {name}: stall {mine['stall']:.3f} s against {peer['stall']:.3f} s; ratios: {ratios}")


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
    parser.add_argument("--dcp", default="thread", choices=["thread", "process"], help="what writes in dcp.async_save")
    parser.add_argument("--at_once", action="store_true", help="on a CPU: no pass before the update")
    args, overrides = parser.parse_known_args()
    args.plans = [args.plan]
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    measure(args, overrides)


if __name__ == "__main__":
    main()
