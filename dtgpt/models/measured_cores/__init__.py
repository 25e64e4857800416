"""Attention cores of models of a user's own that do not say what they get."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(core_sizes=("dtgpt.models.measured_cores.measure:measure",))
