"""Timers of the parts of a step."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(timers=(When("dtgpt.train.timers.parts:PartTimers", ("timers",)),))
