"""What changes with each week of the calendar: the seed of the random cases in the suite, and whose turn it is."""

import os
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest

VARIABLE = "DTGPT_RANDOM_SEED"


def seed_of_the_week() -> int:
    """Return year and ISO week as one number, such as 202647, or what the environment says in its place."""
    year, week, _ = date.today().isocalendar()
    return int(os.environ.get(VARIABLE) or f"{year}{week:02}")


def of_the_week(cases: Sequence[Any], each: int) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`, of which about one in `each` takes its turn this week. The others are
    `long`: together they would take too long for every run."""
    turn = seed_of_the_week() % each
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if index % each == turn else [pytest.mark.long],
        )
        for index, case in enumerate(cases)
    ]
