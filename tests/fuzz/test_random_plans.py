"""Random models under random plans against one process, for half a minute; each week of the calendar has its own
seed, which the report of pytest begins with. DTGPT_RANDOM_SEED=202647 repeats another week's.

    dtgpt compare recipes/gpt2_tiny.py --random 1000 --seed YEAR_AND_WEEK

is the longer run.
"""

from pathlib import Path

import pytest

from dtgpt.cli import main
from tests.support.week import VARIABLE, seed_of_the_week

pytestmark = pytest.mark.slow(12)

MINUTES = 0.4  # after which no other case begins: less than one with that case
TINY = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"


def test_the_seed_is_that_of_the_week_or_as_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    year, week = divmod(seed_of_the_week(), 100)
    assert year >= 2026 and 1 <= week <= 53
    monkeypatch.setenv(VARIABLE, "202601")
    assert seed_of_the_week() == 202601


@pytest.mark.turns(3)
def test_random_cases_of_the_week_are_right_or_refused(capsys):
    seed = seed_of_the_week()
    words = ["--random", "60", "--seed", str(seed), "--minutes", f"{MINUTES:g}", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(TINY), *words])
    said = capsys.readouterr().out
    with capsys.disabled():  # which pytest-xdist does not show: see the report's first lines
        print(f"\nrandom cases with --seed {seed}: {said.splitlines()[-1]}")
    assert ended.value.code == 0, f"{VARIABLE}={seed} repeats these cases; a failure has its own command below\n{said}"
    right = int(said.splitlines()[-1].split()[0])
    assert right >= 1, said  # the machine was not too busy to run any
