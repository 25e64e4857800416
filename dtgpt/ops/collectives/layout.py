"""Sizes in memory that ranks share."""

FLAG = 4  # bytes of a number by which ranks meet
PLACES = 3  # for the weights of blocks: `fully_shard` gathers one while the next one before it is still in use
ROOM = 1 << 26  # bytes of gradients that arrive from the other ranks at once, at most


def aligned(size: int, multiple: int) -> int:
    """Return the next multiple of `multiple`."""
    return -(-size // multiple) * multiple
