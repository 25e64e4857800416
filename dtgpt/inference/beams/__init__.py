"""Beam search: sequences of the largest probability, in place of draws."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    options=("dtgpt.inference.beams.options:BeamOptions",), rank_commands=("dtgpt.inference.beams.search:assign",)
)
