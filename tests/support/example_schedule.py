"""A learning-rate schedule in one file, with an option of its own and what this option cannot be."""

from dataclasses import dataclass
from typing import Annotated

from dtgpt.config.schedule import Schedule
from dtgpt.config.sections import Section
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Is, Other, Rule
from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    schedules={"inverse_sqrt": f"{__name__}:InverseSqrt"}, sections={"inverse_sqrt": f"{__name__}:InverseSqrtConfig"}
)


@dataclass(frozen=True, kw_only=True)
class InverseSqrtConfig(Section):
    shift: Annotated[int, "steps, or samples, after the warmup at which 1 / sqrt(2) of the rate is left", Bounds(1)] = 8


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Schedule):
    """A decay by the inverse square root of the steps since the warmup, which would go on for ever."""

    options = ("inverse_sqrt.shift",)
    rules = (
        *Schedule.rules,
        Rule("inverse_sqrt.shift={shift} is above the schedule's end, {end}; lower it", Is("shift", ">", Other("end"))),
    )

    shift: int

    def fraction(self, before: int) -> float:
        return (1 + (before - self.warmup) / self.shift) ** -0.5
