"""The learning rate as a function of the steps taken, or of the samples seen."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dtgpt.config.batch_size import BatchSizes


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warmup to `lr`, then a decay to `min_lr`; `warmup` and `end` are numbers of steps, or of samples."""

    shape: str  # cosine (Loshchilov and Hutter 2017), linear, constant, wsd (warmup, stable, decay: Hu et al. 2024)
    lr: float
    min_lr: float
    wsd_decay: float  # fraction of the schedule over which wsd decays
    warmup: int
    end: int
    counts_samples: bool

    @property
    def unit(self) -> str:
        return "samples" if self.counts_samples else "steps"

    def rate(self, before: int, after: int) -> float:
        """Return the rate of a step by the steps, or samples, done before and after it."""
        if before < self.warmup:
            return self.lr * min(after / self.warmup, 1.0)
        done = min((before - self.warmup) / max(self.end - self.warmup, 1), 1.0)
        if self.shape == "cosine":
            fraction = 0.5 * (1 + math.cos(math.pi * done))
        elif self.shape == "linear":
            fraction = 1 - done
        elif self.shape == "wsd":
            fraction = min(1.0, (self.end - before) / max(self.wsd_decay * self.end, 1))
        else:
            return self.lr
        return self.min_lr + max(fraction, 0.0) * (self.lr - self.min_lr)

    def rates(self, steps: int, sizes: BatchSizes) -> list[float]:
        """Return the rate of every step of a run whose steps have these batch `sizes`."""
        done = map(sizes.before, range(steps + 1)) if self.counts_samples else range(steps + 1)
        return [self.rate(before, after) for before, after in pairwise(done)]

    def described(self) -> dict[str, Any]:
        """Return the record that a checkpoint keeps."""
        ends = {"warmup_steps": self.warmup, "decay_steps": self.end}
        return {"shape": self.shape, "unit": self.unit, "lr": self.lr, "min_lr": self.min_lr, **ends}
