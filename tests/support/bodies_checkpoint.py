"""What the tests of checkpoints do as the ranks of a plan, and to the files of one: importable by name."""

import ctypes
import gc
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import dtgpt.parallel.shards
from dtgpt.checkpoint import load
from dtgpt.checkpoint import shard_file as host
from dtgpt.checkpoint.load import find_checkpoint, load_training
from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.parallel.layout import slices
from dtgpt.run.folder import RunLock
from dtgpt.run.report import Report
from dtgpt.train.checkpoints import Saving
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer


def digest_of(state: dict[str, Any]) -> str:
    """As docs/checkpoints.md says."""
    return hashlib.sha256((json.dumps(state, indent=2) + "\n").encode()).hexdigest()


def change_state(folder: Path, changes: dict[str, Any]) -> None:
    """Change `state.json` as somebody would who knows the format: with the digest that belongs to it."""
    path = folder / "state.json"
    state = json.loads(path.read_text())
    del state["digest"]
    state |= changes
    path.write_text(json.dumps(state | {"digest": digest_of(state)}, indent=2) + "\n")


@contextmanager
def saving_into(recipe: Recipe, run: Trainer, checkpoints: Path, **options: Any) -> Iterator[Saving]:
    """Yield what saves `run` into the folder `checkpoints`."""
    saving = Saving(run, RunLock(), asdict(recipe), recipe.checkpoint)
    with Saver(checkpoints, run.shards, run.optimizer.rule, **options) as saving.saver:
        run.before_update = saving.saver.before_update
        yield saving


def tensors_of(run: Trainer):
    """(suffix of the name in a checkpoint, what gives a shard's tensor) of weights and moments."""
    rule = run.optimizer.rule
    moments = [(f".{name}", lambda s, name=name: rule.state(s.index)[name]) for name in rule.state(0)]
    return [("", lambda s: s.local), *moments]


def gather(run: Trainer) -> dict[str, Tensor]:
    """Whole weights and moments on rank 0."""
    from dtgpt.compare.whole_tensors import gather_whole

    return {
        name + suffix: whole for suffix, value in tensors_of(run) for name, whole in gather_whole(run.shards, value)
    }


def train_and_save(recipe: Recipe, folder: Path, steps: int, small: int) -> None:
    """Leave a checkpoint in `folder`/checkpoints, and beside it all weights and moments as `Shards.gather` has them.
    Parts of less than `small` elements are written by one rank."""
    with open_trainer(recipe) as run, mock.patch.object(dtgpt.parallel.shards, "SMALL", small):
        for _ in range(steps):
            run.train_step()
        with saving_into(recipe, run, folder / "checkpoints") as saving:
            saving.save(Report(), must=True)
        whole = gather(run)
        if run.mesh.rank == 0:
            torch.save(whole, folder / "whole.pt")


def load_each(recipe: Recipe, folders: list[Path]) -> dict[str, str]:
    """What differs after each folder's checkpoint was loaded into the same shards: on any rank from its part of the
    whole, or on rank 0 after the last one was gathered."""
    wrong = {}
    with open_trainer(recipe) as run:
        for folder in folders:
            truth = torch.load(folder / "whole.pt", mmap=True)
            for shard in run.shards:
                for _, value in tensors_of(run):
                    value(shard).fill_(torch.nan)
                if shard.low_precision is not None:
                    shard.low_precision.fill_(torch.nan)
            step = max((folder / "checkpoints").glob("step_*"))
            own = type(recipe.model)
            load_training(find_checkpoint(run.mesh, folder, step, own=own), run.shards, run.optimizer.rule)
            for shard in run.shards:
                for suffix, value in tensors_of(run):
                    if not torch.equal(value(shard), truth[shard.name + suffix][slices(shard.region)]):
                        wrong[f"{folder.name}: {shard.name}{suffix}"] = f"{shard.region}"
                if shard.low_precision is not None and not torch.equal(
                    shard.low_precision, shard.local.to(shard.low_precision.dtype)
                ):
                    wrong[f"{folder.name}: {shard.name}"] = "narrow"
        whole = gather(run)
        if run.mesh.rank == 0 and whole.keys() != truth.keys():
            wrong[folder.name] = "names"
        if run.mesh.rank == 0 and not all(torch.equal(whole[name], truth[name]) for name in truth):
            wrong[folder.name] = "gathered"
    return wrong


def train_while_a_rank_cannot_write(recipe: Recipe, rank: int, step: int) -> tuple[int, list[str]]:
    """The exit code of a run in which the disk of `rank` alone is full at `step`, and what the savers said."""
    said, write, save = [], host.write_file, import_module("dtgpt.checkpoint.background.saver")

    def full(path, pieces, data):
        if dist.get_rank() == rank and f"step_{step:08d}" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, pieces, data)

    with (
        mock.patch.object(host, "write_file", full),
        mock.patch.object(save, "say", lambda text, **_: said.append(text)),
    ):
        return train(recipe), said


def save_while_a_rank_is_silent(recipe: Recipe, folder: Path, rank: int) -> list[str | None]:
    """Two checkpoints, in the first of which `rank` never reports: what a saver that `must` save raises, and what is
    left in the folder after the second."""
    refused, save = [], import_module("dtgpt.checkpoint.background.saver")
    with open_trainer(recipe) as run, saving_into(recipe, run, folder, timeout=0.4) as saving:
        for silent in (True, False):
            run.train_step()
            late = mock.Mock(side_effect=lambda *_: time.sleep(0.6))
            write = late if silent and dist.get_rank() == rank else save.write_text
            with mock.patch.object(save, "write_text", write):
                try:
                    saving.save(Report(), must=True)
                    refused.append(None)
                except Exception as error:
                    refused.append(f"{type(error).__name__}: {error}")
    return refused


def save_without_inodes(recipe: Recipe, folder: Path) -> list[tuple[str, float]]:
    """For each rank that can make no file at all, what a saver that `must` save raises, and after how many seconds."""

    def full(path, *_):
        raise OSError(28, "No space left on device", str(path))

    with open_trainer(recipe) as run:
        run.train_step()
        return [
            _save_without_inodes(recipe, run, folder.with_name(f"{folder.name}-{rank}"), rank, full)
            for rank in range(run.mesh.world)
        ]


def _save_without_inodes(recipe: Recipe, run: Trainer, folder: Path, rank: int, full: Any) -> tuple[str, float]:
    mine, begin, save = dist.get_rank() == rank, time.monotonic(), import_module("dtgpt.checkpoint.background.saver")
    with (
        saving_into(recipe, run, folder, timeout=600.0) as saving,
        mock.patch.object(save, "write_text", full if mine else save.write_text),
        mock.patch.object(host, "write_file", full if mine else host.write_file),
    ):
        try:
            saving.save(Report(), must=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "saved", 0.0


def begun_from(recipe: Recipe) -> tuple[dict[str, Tensor], int, bool]:
    """(whole weights and moments on rank 0, the step, whether every shard that is there twice agrees) of a run as its
    recipe begins it."""
    with open_trainer(recipe) as run:
        return gather(run), run.step, all(torch.isfinite(shard.local).all() for shard in run.shards)


def private_bytes() -> int:
    """Of this process, in memory of its own: pages of files, which the kernel takes back at will, do not count."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


class Peak:
    """The largest growth of `private_bytes` while it is entered, looked at every half millisecond."""

    def __enter__(self) -> "Peak":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what lies free in the heap would hide growth
        self.growth, self._over, self._begin = 0, threading.Event(), private_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.is_set():
            self.growth = max(self.growth, private_bytes() - self._begin)
            time.sleep(0.0005)

    def __exit__(self, *_) -> None:
        self.growth = max(self.growth, private_bytes() - self._begin)
        self._over.set()
        self._thread.join()


def save_at_once(recipe: Recipe, checkpoints: Path) -> None:
    """A checkpoint of a run that is not begun."""
    with open_trainer(recipe) as run, saving_into(recipe, run, checkpoints) as saving:
        saving.save(Report(), must=True)


def reading_whole_pieces(path, piece, position, part, target, copy=load.copy_overlap) -> int:
    """`copy_overlap` as it must not be."""
    data = np.fromfile(path, "<f4", piece.num_bytes // 4, offset=position)
    time.sleep(0.002)
    return copy(path, piece, position, part, target) + 0 * data.size


def memory_of_loading(recipe: Recipe, folder: Path, greedy: bool) -> tuple[int, int]:
    """(bytes that this rank owns: weights, moments and narrow copies; how much more it takes while a checkpoint is
    found, checked and loaded). All that it owns is there before: every page was written to."""
    reader = reading_whole_pieces if greedy else load.copy_overlap
    with open_trainer(recipe) as run, mock.patch.object(load, "copy_overlap", reader):
        owned = [value(shard) for shard in run.shards for _, value in tensors_of(run)]
        owned += [shard.low_precision for shard in run.shards if shard.low_precision is not None]
        for tensor in owned:
            tensor.fill_(torch.nan)
        dist.barrier()
        with Peak() as peak:
            load_training(find_checkpoint(run.mesh, folder, folder), run.shards, run.optimizer.rule)
        if any(not tensor.isfinite().all() for tensor in owned):
            raise AssertionError("not all was loaded")
        return sum(tensor.nbytes for tensor in owned), peak.growth
