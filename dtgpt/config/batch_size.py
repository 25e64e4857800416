"""How many samples each step has: the global batch size, or Megatron-LM's ramp up to it.

`--rampup_batch_size "START INCREMENT SAMPLES"` begins with START samples a step and adds INCREMENT at equal distances,
so that the whole batch is reached after SAMPLES samples (megatron/microbatches.py of 2023). The size is a function of
the samples that the run has seen, so that a resumed run goes on with the same one.
"""

from bisect import bisect_right
from collections.abc import Callable

from dtgpt.config.plan import ResolvedPlan
from dtgpt.util.errors import UserError, shown


def parse_rampup(text: str) -> tuple[int, int, int]:
    """Return (START, INCREMENT, SAMPLES) of `rampup_batch_size`; raises UserError."""
    try:
        start, increment, samples = map(int, text.replace(",", " ").split())
    except ValueError:
        raise UserError(
            f"rampup_batch_size={shown(text)} is not START INCREMENT SAMPLES; give three whole numbers, as "
            "'32 32 100000'"
        ) from None
    return start, increment, samples


class BatchSizes:
    """The batch sizes of a run that begins, or goes on, with step `first_step` after `first_sample` samples."""

    def __init__(self, whole: int, rampup: str | None = None, first_step: int = 0, first_sample: int = 0):
        """whole: the global batch size; rampup: as of a recipe's `rampup_batch_size`."""
        self.whole, self.rampup = whole, parse_rampup(rampup) if rampup is not None else None
        # (samples seen, step) at which each size begins.
        self._samples, self._steps, self._sizes = [first_sample], [first_step], [self.after(first_sample)]
        consumed, step = first_sample, first_step
        while self._sizes[-1] != whole:
            consumed, step = consumed + self._sizes[-1], step + 1
            if (size := self.after(consumed)) != self._sizes[-1]:
                self._samples.append(consumed)
                self._steps.append(step)
                self._sizes.append(size)

    def after(self, consumed: int) -> int:
        """Return the samples of the step that begins after `consumed` samples."""
        if self.rampup is None or consumed > self.rampup[2]:
            return self.whole
        start, increment, samples = self.rampup
        distance = samples / ((self.whole - start) // increment)
        return min(self.whole, start + int(consumed / distance) * increment if distance else self.whole)

    def at(self, step: int) -> int:
        """Return the samples of `step`, over all replicas."""
        return self._sizes[self._piece(step)]

    def before(self, step: int) -> int:
        """Return the samples that the run has seen when `step` begins."""
        i = self._piece(step)
        return self._samples[i] + (step - self._steps[i]) * self._sizes[i]

    def steps_within(self, samples: int) -> int:
        """Return the number of whole steps that the first `samples` of the run fill."""
        i = max(0, bisect_right(self._samples, samples) - 1)
        return self._steps[i] + (samples - self._samples[i]) // self._sizes[i]

    def metrics(self, step: int) -> dict[str, int]:
        """Return what a progress line adds for `step`: its samples, where they change."""
        return {"batch_size": self.at(step)} if len(self._sizes) > 1 else {}

    def _piece(self, step: int) -> int:
        return max(0, bisect_right(self._steps, step) - 1)


def check_rampup(rampup: str, whole: int, micro: int, plan: ResolvedPlan, fits: Callable[[int, int], bool]) -> None:
    """Raise UserError where the plan cannot split a size of the ramp up to `whole` samples. `fits`: whether it can
    split (samples of a step, samples of a micro-batch)."""
    start, increment, _ = parse_rampup(rampup)
    wrong = next((size for size in range(start, whole, increment) if not fits(size, micro)), None)
    if wrong is None:
        return
    multiple = micro * plan.dp * plan.pp
    raise UserError(
        f"rampup_batch_size={shown(rampup)} passes {wrong} samples a step, which micro_batch_size={micro} and the plan "
        f"{plan.name} (dp={plan.dp}) cannot split; use multiples of {multiple} for START and INCREMENT, a smaller "
        "micro_batch_size (the curve stays the same), or --rampup_batch_size none"
    )
