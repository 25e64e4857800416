"""Marks of slow tests are compared with what the tests take."""

import pytest

from tests.support.budgets import LIMIT, budget_of, wrong_marks
from tests.support.week import VARIABLE, of_the_week

NAME = "tests/promises/test_budgets.py::test_missing_and_wrong_marks_are_told"


@pytest.mark.parametrize(
    "budget, seconds, times, told",
    [
        (LIMIT, 0.9, 1, None),
        (LIMIT, 2.5, 1, "takes 2.5 s: give it pytest.mark.slow(2)"),
        (LIMIT, 1.5, 2, None),  # the machine is half as fast
        (20.0, 30.0, 1, None),
        (20.0, 90.0, 1, "takes 90.0 s, not 20: give it pytest.mark.slow(90)"),
        (20.0, 4.0, 1, "takes 4.0 s, not 20: pytest.mark.slow(4)"),
        (20.0, 1.0, 1, "takes 1.0 s, not 20: no mark"),
    ],
)
def test_missing_and_wrong_marks_are_told(request, budget, seconds, times, told):
    assert budget_of(request.node) == (NAME, LIMIT)
    phases = [(NAME, budget, seconds / 2)] * 2
    assert wrong_marks(phases, times) == ([f"{NAME} {told}"] if told else [])


def test_each_case_takes_its_turn_in_one_week(monkeypatch):
    turns = []
    for week in range(202651, 202654):
        monkeypatch.setenv(VARIABLE, str(week))
        turns += [case.values for case in of_the_week([("dp2", 1), "tp2", "pp2", "cp2"], 3) if not case.marks]
    assert sorted(turns) == [("cp2",), ("dp2", 1), ("pp2",), ("tp2",)]
