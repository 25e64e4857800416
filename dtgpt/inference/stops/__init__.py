"""Texts that end a generated text, also across tokens."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(text_ends=("dtgpt.inference.stops.search:end_of",))
