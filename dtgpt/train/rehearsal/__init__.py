"""The kernels of the first step are compiled side by side, before that step."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(observers=(When("dtgpt.train.rehearsal.observer:observe", ("device=auto", "device=cuda")),))
