"""Pipeline stages that cost about the same."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(stage_cuts=("dtgpt.parallel.balanced_stages.cut:balanced_cut",))
