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
from typing import TYPE_CHECKING, Any, ClassVar, ForwardRef, Literal

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.util import seams
from dtgpt.util.rules import Given, Is, Other, Rule, Rules


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
    """Linear warmup to `lr`, then a decay to `min_lr`; `warmup` and `end` are numbers of steps, or of samples. A class
    for each schedule says what is its own, all of it: `fraction`, and the following.

    decays: whether the rate ends at `min_lr`.
    options: names of options, as in a recipe, that have an effect with this schedule alone; each has a field here, by
    the last part of its name.
    rules: tables of what the values cannot be, by the names of the fields.
    """

    decays: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[Rules] = (
        Rule(
            "optimizer.min_lr={min_lr} is above optimizer.lr={lr}; give a lower --optimizer.min_lr, such as {remedy} "
            "(a tenth of lr is usual), or a higher lr",
            Is("min_lr", ">", Other("lr")),
            Given("decays"),
            remedy=lambda schedule: f"{schedule.lr / 10:.3g}",
        ),
    )

    shape: str  # its name
    lr: float
    min_lr: float
    warmup: int
    end: int
    counts_samples: bool

    @property
    def unit(self) -> str:
        return "samples" if self.counts_samples else "steps"

    def fraction(self, before: int) -> float:
        """Return the rate after the warmup, 1 for `lr` and 0 or less for `min_lr`, by the steps, or samples, done."""
        raise NotImplementedError

    def done(self, before: int) -> float:
        """Return how much of the decay is done: 0 at the end of the warmup, 1 from the end of the schedule on."""
        return min((before - self.warmup) / max(self.end - self.warmup, 1), 1.0)

    def rate(self, before: int, after: int) -> float:
        """Return the rate of a step by the steps, or samples, done before and after it."""
        if before < self.warmup:  # by what is done after the step, so that the first one learns, too
            return self.lr * min(after / self.warmup, 1.0)
        if not self.decays:
            return self.lr
        # Beyond the end, in a run that is longer than its schedule, the rate stays min_lr.
        return self.min_lr + max(self.fraction(before), 0.0) * (self.lr - self.min_lr)

    def rates(self, steps: int, sizes: BatchSizes) -> list[float]:
        """Return the rate of every step of a run whose steps have these batch `sizes`."""
        done = map(sizes.before, range(steps + 1)) if self.counts_samples else range(steps + 1)
        return [self.rate(before, after) for before, after in pairwise(done)]

    def described(self) -> dict[str, Any]:
        """Return the record that a checkpoint keeps."""
        ends = {"warmup_steps": self.warmup, "decay_steps": self.end}
        return {"shape": self.shape, "unit": self.unit, "lr": self.lr, "min_lr": self.min_lr, **ends}


class Cosine(Schedule):
    """Half a period of a cosine (Loshchilov and Hutter 2017)."""

    def fraction(self, before: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * self.done(before)))


def schedules() -> dict[str, type[Schedule]]:
    """Return the classes of the schedules by name: that of the core, and those of capabilities."""
    return {"cosine": Cosine} | {name: seams.load(part) for name, part in seams.added("schedules").items()}


def choice_of_schedule() -> Any:
    """Return the type of a recipe's choice among the schedules."""
    return Literal[tuple(schedules())]


if TYPE_CHECKING:  # type checkers do not see what capabilities add
    ScheduleName = str
else:  # evaluated where a recipe is checked, and not here: modules that describe capabilities import `config.sections`
    ScheduleName = ForwardRef("choice_of_schedule()", module=__name__)
