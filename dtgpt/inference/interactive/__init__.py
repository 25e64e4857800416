"""Prompts that a user types, for `dtgpt generate` and `dtgpt chat`."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(prompt_options=("dtgpt.inference.interactive.options:InteractiveOptions",))
