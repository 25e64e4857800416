"""The kernels of the first step are compiled side by side, before that step."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(observers=("dtgpt.train.rehearsal.observer:observe",))
