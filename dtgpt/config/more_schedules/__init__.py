"""Learning-rate schedules beside a cosine: a straight line, none, and warmup, stable, decay."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    schedules={
        "linear": "dtgpt.config.more_schedules.schedules:Linear",
        "constant": "dtgpt.config.more_schedules.schedules:Constant",
        "wsd": "dtgpt.config.more_schedules.schedules:Wsd",
    }
)
