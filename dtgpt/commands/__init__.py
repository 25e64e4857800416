"""The commands of `dtgpt`, one module each: a dataclass of options, and `command`, called with the words after it."""
