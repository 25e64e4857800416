"""The learning rate of every step, as a function of the steps taken or of the samples seen, and how many samples each
step has.

Both are functions of a step's number, or of the samples before it, and have no state. So a run that goes on, under
another plan too, needs nothing but the step and the samples of its checkpoint, and all rates can be put on the device
before the first step."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig


class BatchSizes:
    """The batch sizes of a run that begins, or goes on, with step `first_step` after `first_sample` samples: here, the
    whole global batch in every step."""

    def __init__(self, whole: int, first_step: int = 0, first_sample: int = 0):
        """whole: the global batch size."""
        self.whole = whole
        # (step, samples seen) at which each size begins, and the size: few, however many steps it takes.
        self.pieces = [(first_step, first_sample, whole)]

    def check_plan(self, plan: ResolvedPlan, model: ModelConfig, micro: int, seq_length: int) -> None:
        """Raise UserError where the plan cannot split a size below the whole into micro-batches."""

    def at(self, step: int) -> int:
        """Return the samples of `step`, over all replicas."""
        return self._piece(step)[2]

    def before(self, step: int) -> int:
        """Return the samples that the run has seen when `step` begins. Those of before the first step whose size is
        known are spread evenly over the earlier steps, which is exact unless their sizes changed."""
        first, seen, size = self._piece(step)
        return seen + (step - first) * size if step >= first else seen * step // first

    def steps_within(self, samples: int) -> int:
        """Return the number of whole steps that the first `samples` of the run fill."""
        first, seen, size = self._piece(samples, key=1)  # pieces are in the order of their samples, too
        return first + (samples - seen) // size

    def _piece(self, place: int, key: int = 0) -> tuple[int, int, int]:
        return self.pieces[max(0, bisect_right(self.pieces, place, key=itemgetter(key)) - 1)]


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

    @property
    def decay_begin(self) -> float:
        """Where the decay of wsd begins."""
        return self.end - self.wsd_decay * self.end

    def rate(self, before: int, after: int) -> float:
        """Return the rate of a step by the steps, or samples, done before and after it."""
        if before < self.warmup:  # by what is done after the step, so that the first one learns, too
            return self.lr * min(after / self.warmup, 1.0)
        # Beyond the end, in a run that is longer than its schedule, the rate stays min_lr.
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
