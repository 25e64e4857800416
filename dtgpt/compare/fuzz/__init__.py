"""Random models under random plans, each held against one process: `dtgpt compare RECIPE --random N`."""
