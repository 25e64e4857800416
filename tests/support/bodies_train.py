"""Whole runs as the ranks of a plan: functions importable by name."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dtgpt.config.recipe import Recipe
from dtgpt.models.layers import AttentionCore
from dtgpt.train.loop import train
from dtgpt.train.objective import LanguageModel
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError


def train_until(recipe: Recipe, step: int, rank: int) -> int:
    """The exit code of a run in which `rank` alone gets SIGTERM while it is at `step`."""
    done = Trainer.train_step

    def step_then_signal(self):
        result = done(self)
        if self.step == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with mock.patch.object(Trainer, "train_step", step_then_signal):
        return train(recipe)


def train_whole_and_in_parts(recipe: Recipe, parts: Recipe, stop: int) -> list[int]:
    """The exit codes of a run, of one in another folder that rank 0 ends at step `stop`, and of its resume."""
    codes = [train(recipe), train_until(parts, stop, 0)]
    return [*codes, train(replace(parts, resume="auto"))]


def steps_with_an_overflow(recipe: Recipe) -> tuple[list[dict[str, float]], list[bool], int]:
    """Four fp16 steps; in the second one number on rank 1 alone is infinite, in the third one is too large for fp16.
    What is told of the loss scale after each, whether this rank's weights stayed the same, and the updates in the
    end."""
    from dtgpt.optim.fp16.loss_scale import SKIP_ABOVE

    with open_trainer(recipe) as run:
        scaling, unchanged = [], []
        for step in range(4):
            before = [shard.local.clone() for shard in run.shards]
            loss = run.gradients()
            if step in (1, 2) and run.mesh.rank == 1:
                run.shards.gradients[0].view(-1)[0] = torch.inf if step == 1 else 2 * SKIP_ABOVE
            run.update(loss)
            scaling.append(run.optimizer.metrics())
            unchanged.append(all(torch.equal(s.local, old) for s, old in zip(run.shards, before, strict=True)))
        return scaling, unchanged, run.optimizer.state()["updates"]


def skipped_after_each_step(recipe: Recipe, steps: int) -> list[float]:
    """Steps that fp16 has skipped so far, after each of the first `steps`."""
    with open_trainer(recipe) as run:
        found = []
        for _ in range(steps):
            run.train_step()
            found.append(run.optimizer.metrics()["skipped_steps"])
        return found


@dataclass
class WatchedStep:
    loss: float
    metrics: dict[str, float]
    unchanged: bool  # no weight of this rank changed
    updates: int  # applied so far


@contextmanager
def outlier_at(strange: int, window: int) -> Iterator[None]:
    """Give the step `strange`, counted from 0, tokens of no other step, and look for outliers in so many steps."""
    read = LanguageModel.read

    def read_strange(self, step):
        windows, ids, key = read(self, step)
        return (37 * windows + 11) % self.parts.settings.model.vocab_size if step == strange else windows, ids, key

    with (
        mock.patch.object(LanguageModel, "read", read_strange),
        mock.patch("dtgpt.optim.z_scores.detector.WINDOW", window),
    ):
        yield


def steps_with_an_outlier(recipe: Recipe, strange: int, window: int) -> list[WatchedStep]:
    """What each step of a run did whose step `strange` has an outlier for a batch."""
    with outlier_at(strange, window), open_trainer(recipe) as run:
        found = []
        for _ in range(run.steps):
            before = [shard.local.clone() for shard in run.shards]
            loss = run.mean_loss(run.train_step())
            same = all(torch.equal(s.local, old) for s, old in zip(run.shards, before, strict=True))
            found.append(WatchedStep(loss, run.optimizer.metrics(), same, run.optimizer.state()["updates"]))
        return found


def train_with_an_outlier(recipe: Recipe, strange: int, window: int) -> None:
    with outlier_at(strange, window):
        assert train(recipe) == 0


def train_while_the_folder_goes(recipe: Recipe, step: int) -> str:
    """What ends a run whose folder rank 0 moves while it is at `step`."""
    done, runs = Trainer.train_step, Path(recipe.runs)

    def step_then_move(self):
        result = done(self)
        if self.step == step and dist.get_rank() == 0:
            (runs / "test-001").rename(runs / "elsewhere")
        return result

    with mock.patch.object(Trainer, "train_step", step_then_move):
        try:
            return f"exit code {train(recipe)}"
        except UserError as error:
            return str(error)


def texts_between_steps(case: tuple[Recipe, bool]) -> tuple[list[str], list[float], list[bool]]:
    """Of a recipe, and whether to generate: texts before the first and after each of two steps, the losses of the
    steps, and whether each attention core has a cache in the end."""
    recipe, sampling = case
    from dtgpt.train.texts.generate import generate_text

    with open_trainer(recipe) as run:
        texts, found = [generate_text(run) for _ in range(2 * sampling)], []
        for _ in range(2):
            found.append(run.mean_loss(run.train_step()))
            texts += [generate_text(run)] * sampling
        cores = [module for stage in run.stages for module in stage.modules() if isinstance(module, AttentionCore)]
        return texts, found, [core.bound.cache is not None for core in cores]


@dataclass
class Changes:
    """What some steps of a run changed: their losses, whether weights or the optimizer's state of this rank moved, the
    learning rate of each; updates and what a checkpoint would say in the end."""

    losses: list[float]
    moved: list[bool]
    rates: list[float]
    updates: int
    state: dict


def steps_and_changes(recipe: Recipe, steps: int) -> Changes:
    with open_trainer(recipe) as run:

        def values() -> list[torch.Tensor]:
            states = (
                tensor for index in range(len(list(run.shards))) for tensor in run.optimizer.rule.state(index).values()
            )
            return [tensor.clone() for tensor in (*(shard.local for shard in run.shards), *states)]

        found = Changes([], [], [], 0, {})
        for _ in range(steps):
            before = values()
            found.losses.append(run.mean_loss(run.train_step()))
            found.moved.append(not all(map(torch.equal, before, values())))
            found.rates.append(run.optimizer.lr.item())
        found.state = run.optimizer.state()
        found.updates = found.state["updates"]
        return found
