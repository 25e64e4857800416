"""Signals end a run after a step, with a checkpoint."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(stops=("dtgpt.run.stops.signals:Signals",))
