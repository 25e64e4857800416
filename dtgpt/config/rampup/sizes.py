"""Megatron-LM's ramp up to the global batch size.

`--rampup_batch_size "START INCREMENT SAMPLES"` begins with START samples a step and adds INCREMENT at equal distances,
so that the whole batch is reached after SAMPLES samples (megatron/microbatches.py of 2023). The size is a function of
the samples that the run has seen, so that a resumed run goes on with the same one.
"""

from typing import Any, NamedTuple

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe_rules import MOST_STEPS
from dtgpt.config.schedule import BatchSizes
from dtgpt.models.config import ModelConfig
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Is, Missing, Rule, Rules, check_rules

RULES: Rules = (
    Rule(
        "rampup_batch_size={text!r} does not lead to global_batch_size={whole}; START must be below it, and INCREMENT "
        "divide the difference, as in '32 32 100000' for 256",
        Missing("reaches_whole"),
    ),
    Rule(
        f"rampup_batch_size={{text!r}} takes more than {MOST_STEPS} steps to reach global_batch_size={{whole}}; use "
        "fewer SAMPLES",
        Is("steps", ">", MOST_STEPS),
    ),
)


class Ramp(NamedTuple):
    """Batch sizes from `start` on, `increment` more at equal distances, to the `whole` after so many `samples`."""

    start: int
    increment: int
    samples: int
    whole: int

    @property
    def reaches_whole(self) -> bool:
        """Whether the sizes lead to the whole batch."""
        if not 0 < self.start < self.whole or self.increment < 1 or self.samples < 0:
            return False
        return (self.whole - self.start) % self.increment == 0

    @property
    def steps(self) -> int:
        """About how many steps lead to the whole batch."""
        return 2 * self.samples // (self.start + self.whole)


def parse_rampup(text: str, whole: int) -> Ramp:
    """Return the ramp of `rampup_batch_size` to the `whole` batch; raises UserError."""
    try:
        start, increment, samples = map(int, text.replace(",", " ").split())
    except ValueError:
        raise UserError(
            f"rampup_batch_size={shown(text)} is not START INCREMENT SAMPLES; give three whole numbers, as "
            "'32 32 100000'"
        ) from None
    return Ramp(start, increment, samples, whole)


class RampedSizes(BatchSizes):
    """The batch sizes of a run with a ramp: `rampup_batch_size` of a recipe. Raises UserError for one that is none."""

    def __init__(self, rampup: str, whole: int, first_step: int = 0, first_sample: int = 0):
        super().__init__(whole, first_step, first_sample)
        self.text, self.rampup = rampup, parse_rampup(rampup, whole)
        check_rules(RULES, self.rampup, text=rampup)
        self.pieces = [(first_step, first_sample, self.after(first_sample))]
        step, seen, size = self.pieces[0]
        while size != whole:
            step, seen = step + 1, seen + size
            if (larger := self.after(seen)) != size:
                size = larger
                self.pieces.append((step, seen, size))

    def after(self, consumed: int) -> int:
        """Return the samples of the step that begins after `consumed` samples."""
        start, increment, samples, whole = self.rampup
        if consumed > samples:
            return whole
        distance = samples / ((whole - start) // increment)
        return min(whole, start + int(consumed / distance) * increment if distance else whole)

    def check_plan(self, plan: ResolvedPlan, model: ModelConfig, micro: int, seq_length: int) -> None:
        for size in range(self.rampup.start, self.whole, self.rampup.increment):
            try:
                plan.validate(model, micro, size, seq_length)
            except UserError:
                raise UserError(
                    f"rampup_batch_size={shown(self.text)} passes {size} samples a step, which "
                    f"micro_batch_size={micro} and the plan {plan.name} (dp={plan.dp}) cannot split; use multiples of "
                    f"{micro * plan.dp * plan.pp} for START and INCREMENT, a smaller micro_batch_size (the curve stays "
                    "the same), or --rampup_batch_size none"
                ) from None


def ramped(recipe: Any, first_step: int = 0, first_sample: int = 0) -> RampedSizes:
    """Return the batch sizes of a `dtgpt.config.recipe.Recipe`, from a step on. Raises UserError."""
    return RampedSizes(recipe.rampup_batch_size, recipe.global_batch_size, first_step, first_sample)
