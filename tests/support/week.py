"""The seed of the random cases in the suite, which changes with each week of the calendar."""

import os
from datetime import date

VARIABLE = "DTGPT_RANDOM_SEED"


def seed_of_the_week() -> int:
    """Return year and ISO week as one number, such as 202647, or what the environment says in its place."""
    year, week, _ = date.today().isocalendar()
    return int(os.environ.get(VARIABLE) or f"{year}{week:02}")
