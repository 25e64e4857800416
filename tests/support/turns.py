"""Whose turn it is today: all slow tests together would take too long for every run."""

import os
from collections import Counter
from datetime import date
from zlib import crc32

import pytest

DAY = "DTGPT_TURNS"  # an environment variable: the number of the day, empty where tests are asked for by name


def begin_turns(config) -> None:
    """Set the day for this process and the workers that it starts, which might start after midnight."""
    if not hasattr(config, "workerinput"):
        named = config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword
        os.environ[DAY] = "" if named else str(date.today().toordinal())


def is_whole() -> bool:
    """Return whether all tests were asked for, not some by name."""
    return bool(os.environ[DAY])


def take_turns(items) -> list:
    """Mark as `long` those of the tests that share a mark `turns(days)`, the one nearest to each, whose day it is not,
    and return them; none where tests were asked for by name."""
    places, waiting = Counter[str](), []
    for item in items if is_whole() else ():
        if (found := next(item.iter_markers_with_node("turns"), None)) is None:
            continue
        node, mark = found
        # A mark of a function is a mark of each of its cases.
        sharing = item.nodeid.partition("[")[0] if node is item else node.nodeid
        first = crc32(sharing.encode())  # so that not all first cases have the same day
        if (int(os.environ[DAY]) + first + places[sharing]) % mark.args[0]:
            item.add_marker(pytest.mark.long)
            waiting.append(item)
        places[sharing] += 1
    return waiting
