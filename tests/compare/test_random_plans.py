"""Random models under random plans against one process: a few cases of one seed, the same in every run.

    dtgpt compare recipes/gpt2_tiny.py --random 1000 --seed YEAR_AND_WEEK

is the longer run; .github/workflows/tests.yml has one with another seed each week.
"""

from pathlib import Path

import pytest

from dtgpt.cli import main

pytestmark = pytest.mark.slow(10)

# Of 1,600 seeds, one whose first cases meet most of what a case can have (architectures, optimizers, precisions,
# ep, kinds of cuts and schedules ...) in few steps.
CASES, SEED = 5, 882
TINY = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"


def test_random_cases_are_right_or_refused(capsys):
    words = ["--random", str(CASES), "--seed", str(SEED), "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(TINY), *words])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    right = int(said.splitlines()[-1].split()[0])
    assert right >= CASES // 2, said  # most of what is drawn is no refusal
