"""Beam search: sequences of the largest probability, in place of draws."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    options=("dtgpt.inference.beams.options:BeamOptions",),
    engines=("dtgpt.inference.beams.engine:SearchEngine",),
    schedulers=("dtgpt.inference.beams.engine:SearchScheduler",),
    rank_commands=("dtgpt.inference.beams.search:assign",),
)
