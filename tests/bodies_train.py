"""Whole runs as the ranks of a plan: functions importable by name, for `tests.ranks`."""

import os
import signal
from unittest import mock

import torch.distributed as dist

from dtgpt.recipe import Recipe
from dtgpt.train import Training, train


def train_until(recipe: Recipe, step: int, rank: int) -> int:
    """The exit code of a run in which `rank` alone gets SIGTERM while it is at `step`."""
    done = Training.train_step

    def step_then_signal(self, lr):
        result = done(self, lr)
        if self.step == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with mock.patch.object(Training, "train_step", step_then_signal):
        return train(recipe)
