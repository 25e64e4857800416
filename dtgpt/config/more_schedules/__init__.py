"""Learning-rate schedules beside a cosine: a straight line, none, and warmup, stable, decay."""

from typing import Annotated

from dtgpt.util.field_types import Bounds
from dtgpt.util.seams import Capability


class OptimizerFields:
    wsd_decay: Annotated[float, "final fraction of the schedule, in which wsd decays", Bounds(above=0, at_most=1)] = 0.2


CAPABILITY = Capability(
    optimizer_fields=("dtgpt.config.more_schedules:OptimizerFields",),
    schedules={
        "linear": "dtgpt.config.more_schedules.schedules:Linear",
        "constant": "dtgpt.config.more_schedules.schedules:Constant",
        "wsd": "dtgpt.config.more_schedules.schedules:Wsd",
    },
)
