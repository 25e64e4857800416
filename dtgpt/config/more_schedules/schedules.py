"""Formulas of learning rates, each with its own options and their rules."""

import math
from dataclasses import dataclass

from dtgpt.config.schedule import Schedule
from dtgpt.util.rules import Is, Other, Rule


class Linear(Schedule):
    """A straight line to the end."""

    def fraction(self, before: int) -> float:
        return 1 - self.done(before)


class Constant(Schedule):
    """No decay, and so no end."""

    decays = False


@dataclass(frozen=True, kw_only=True)
class Wsd(Schedule):
    """Warmup, stable, decay (Hu et al. 2024): `lr` up to a final fraction of the schedule, then a straight line."""

    options = ("optimizer.wsd_decay",)
    rules = (
        *Schedule.rules,
        Rule(
            "the warmup of {warmup} {unit} ends inside the decay of wsd, which begins at {decay_begin:g} of {end} "
            "(optimizer.wsd_decay={wsd_decay}), so the learning rate would jump; warm up for {longest_warmup} or "
            "fewer, or lower optimizer.wsd_decay",
            Is("warmup", ">", Other("decay_begin")),
            Is("warmup", "<", Other("end")),
        ),
    )

    wsd_decay: float  # fraction of the schedule over which it decays

    @property
    def decay_begin(self) -> float:
        return self.end - self.wsd_decay * self.end

    @property
    def longest_warmup(self) -> int:
        """The longest warmup that ends before the decay."""
        return math.floor(self.decay_begin)

    def fraction(self, before: int) -> float:
        return min(1.0, (self.end - before) / max(self.wsd_decay * self.end, 1))
