"""Files of prompts for `dtgpt generate`, and files of its results."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(prompt_options=("dtgpt.inference.prompt_files.options:FileOptions",))
