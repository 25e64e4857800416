"""What changes with each week of the calendar: the seed of the random cases in the suite, and whose turn it is."""

import os
from collections import Counter
from datetime import date
from zlib import crc32

import pytest

VARIABLE = "DTGPT_RANDOM_SEED"


def seed_of_the_week() -> int:
    """Return year and ISO week as one number, such as 202647, or what the environment says in its place."""
    year, week, _ = date.today().isocalendar()
    return int(os.environ.get(VARIABLE) or f"{year}{week:02}")


def take_turns(items) -> list:
    """Mark as `long` those of the tests that share a mark `turns(weeks)`, the one nearest to each, whose week it is
    not, and return them. All would together take too long for every run."""
    week, places, waiting = seed_of_the_week(), Counter[str](), []
    for item in items:
        if (found := next(item.iter_markers_with_node("turns"), None)) is None:
            continue
        node, mark = found
        # A mark of a function is a mark of each of its cases.
        sharing = item.nodeid.partition("[")[0] if node is item else node.nodeid
        first = crc32(sharing.encode())  # so that not all first cases have the same week
        if (week + first + places[sharing]) % mark.args[0]:
            item.add_marker(pytest.mark.long)
            waiting.append(item)
        places[sharing] += 1
    return waiting
