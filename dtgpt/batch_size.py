"""How many samples each step has: the global batch size, or Megatron-LM's ramp up to it.

`--rampup_batch_size "START INCREMENT SAMPLES"` begins with START samples a step and adds INCREMENT at equal distances,
so that the whole batch is reached after SAMPLES samples (megatron/microbatches.py of 2023). The size is a function of
the samples that the run has seen, so that a resumed run goes on with the same one.
"""

from bisect import bisect_right

from dtgpt.errors import UserError, shown
from dtgpt.recipe import Recipe
from dtgpt.recipe_checks import parse_rampup


def batch_size(consumed: int, recipe: Recipe) -> int:
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

    def __init__(self, recipe: Recipe, first_step: int = 0, first_sample: int = 0):
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

    def told(self, step: int) -> dict[str, int]:
        """What a progress line says of `step`: its samples, where they change."""
        return {"batch_size": self.at(step)} if len(self._sizes) > 1 else {}

    def _piece(self, step: int) -> int:
        return max(0, bisect_right(self._steps, step) - 1)


def check_rampup(recipe: Recipe, world: int) -> None:
    """Raise UserError where a size of the ramp cannot be split as the plan wants it."""
    if recipe.rampup_batch_size is None:
        return
    start, increment, _ = parse_rampup(recipe.rampup_batch_size)
    plan = recipe.named_plan().for_world(world)
    for size in range(start, recipe.global_batch_size, increment):
        try:
            plan.validate(recipe.model, recipe.micro_batch_size, size)
        except UserError as error:
            raise UserError(
                f"rampup_batch_size={shown(recipe.rampup_batch_size)} passes {size} samples a step: {error}"
            ) from None
