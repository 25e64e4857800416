"""Batches that grow as a run begins."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(rampups=("dtgpt.config.rampup.sizes:RampedSizes",))
