"""Sizes in memory that ranks share."""

FLAG = 4  # bytes of a number by which ranks meet


def aligned(size: int, multiple: int) -> int:
    """Return the next multiple of `multiple`."""
    return -(-size // multiple) * multiple
