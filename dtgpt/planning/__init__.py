"""What a plan needs, from shapes alone: memory, messages and idle time of `dtgpt plan`."""
