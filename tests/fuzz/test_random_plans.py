"""Random models under random plans against one process, for a minute; each week of the calendar has its own seed.

    dtgpt compare recipes/gpt2_tiny.py --random 1000 --seed YEAR_AND_WEEK

is the longer run.
"""

from datetime import date
from pathlib import Path

import pytest

from dtgpt.cli import main

MINUTES = 1.0
TINY = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"


@pytest.mark.long
def test_random_cases_of_the_week_are_right_or_refused(capsys):
    year, week, _ = date.today().isocalendar()
    seed = f"{year}{week:02}"
    words = ["compare", str(TINY), "--random", "60", "--seed", seed, "--minutes", f"{MINUTES:g}", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\nrandom cases with --seed {seed}: {said.splitlines()[-1]}")
    assert ended.value.code == 0, said
    right = int(said.splitlines()[-1].split()[0])
    assert right >= 5, said  # the machine was not too busy to run any
