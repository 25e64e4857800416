"""Timers of the parts of a step."""

from typing import Annotated

from dtgpt.util.seams import Capability, When


class LogFields:
    timers: Annotated[bool, "measure forward, backward, optimizer, data and save"] = False


CAPABILITY = Capability(
    log_fields=("dtgpt.train.timers:LogFields",),
    timers=(When("dtgpt.train.timers.parts:PartTimers", ("timers",)),),
)
