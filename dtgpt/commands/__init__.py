"""The commands of `dtgpt`, one module each: a dataclass of options, and `COMMAND`, called with the words behind it."""
