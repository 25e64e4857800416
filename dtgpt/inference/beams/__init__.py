"""Beam search: sequences of the largest probability, in place of draws."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(searches=("dtgpt.inference.beams.options:BEAMS",))
