"""How many samples each step has: the global batch size, or Megatron-LM's ramp up to it.

`--rampup_batch_size "START INCREMENT SAMPLES"` begins with START samples a step and adds INCREMENT at equal distances,
so that the whole batch is reached after SAMPLES samples (megatron/microbatches.py of 2023). The size is a function of
the samples that the run has seen, so that a resumed run goes on with the same one.
"""

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from dtgpt.errors import UserError, shown

if TYPE_CHECKING:
    from dtgpt.parallel.plan import Plan
    from dtgpt.recipe import Recipe


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


def batch_size(consumed: int, recipe: "Recipe") -> int:
    """Samples of the step that begins after `consumed` samples."""
    whole = recipe.global_batch_size
    if recipe.rampup_batch_size is None:
        return whole
    start, increment, samples = parse_rampup(recipe.rampup_batch_size)
    if consumed > samples:
        return whole
    distance = samples / ((whole - start) // increment)
    return min(whole, start + int(consumed / distance) * increment if distance else whole)


class BatchSizes:
    """Of every step of a run that begins, or goes on, with step `first_step` after `first_sample` samples."""

    def __init__(self, recipe: "Recipe", first_step: int = 0, first_sample: int = 0):
        # (samples seen, step) at which each size begins.
        self._samples, self._steps, self._sizes = [first_sample], [first_step], [batch_size(first_sample, recipe)]
        consumed, step = first_sample, first_step
        while self._sizes[-1] != recipe.global_batch_size:
            consumed, step = consumed + self._sizes[-1], step + 1
            if (size := batch_size(consumed, recipe)) != self._sizes[-1]:
                self._samples.append(consumed)
                self._steps.append(step)
                self._sizes.append(size)

    def at(self, step: int) -> int:
        """Samples of `step`, over all replicas."""
        return self._sizes[self._piece(step)]

    def before(self, step: int) -> int:
        """Samples that the run has seen when `step` begins."""
        i = self._piece(step)
        return self._samples[i] + (step - self._steps[i]) * self._sizes[i]

    def steps_within(self, samples: int) -> int:
        """Return the number of whole steps that the first `samples` of the run fill."""
        i = max(0, bisect_right(self._samples, samples) - 1)
        return self._steps[i] + (samples - self._samples[i]) // self._sizes[i]

    def told(self, step: int) -> dict[str, int]:
        """What a progress line says of `step`: its samples, where they change."""
        return {"batch_size": self.at(step)} if len(self._sizes) > 1 else {}

    def _piece(self, step: int) -> int:
        return max(0, bisect_right(self._steps, step) - 1)


def check_rampup(recipe: "Recipe", plan: "Plan") -> None:
    """Raise UserError, with a remedy that works, where the plan cannot split a size of the ramp."""
    if recipe.rampup_batch_size is None:
        return
    start, increment, samples = parse_rampup(recipe.rampup_batch_size)
    whole, micro = recipe.global_batch_size, recipe.micro_batch_size

    def fits(size: int, micro: int = micro) -> bool:
        try:
            plan.validate(recipe.model, micro, size)
        except UserError:
            return False
        return True

    wrong = next((size for size in range(start, whole, increment) if not fits(size)), None)
    if wrong is None:
        return
    remedies = []
    common = math.gcd(start, increment, whole)
    smaller = (m for m in range(micro - 1, 0, -1) if common % (m * plan.dp) == 0)
    if found := next((m for m in smaller if all(fits(size, m) for size in range(start, whole, increment))), None):
        remedies.append(f"--micro_batch_size {found} (the curve stays the same)")
    # Ramps over multiples of a share, from the first one that fits.
    share = micro * plan.dp
    multiples = range(share, whole, share)
    first = next((size for size in multiples if size >= start and fits(size)), None)
    steps = [n for n in multiples if first and (whole - first) % n == 0 and all(map(fits, range(first, whole, n)))]
    if steps:
        nearest = min(steps, key=lambda n: (n < increment, abs(n - increment)))
        remedies.append(f"another START and INCREMENT, as in --rampup_batch_size '{first} {nearest} {samples}'")
    raise UserError(
        f"rampup_batch_size={shown(recipe.rampup_batch_size)} passes {wrong} samples a step, which "
        f"micro_batch_size={micro} and the plan {plan.name} (dp={plan.dp}) cannot split; use "
        + ", or ".join(remedies or ["--rampup_batch_size none"])
    )
