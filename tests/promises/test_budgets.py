"""Marks of slow tests are compared with what the tests take, and which tests run does not depend on the date."""

import ast
from pathlib import Path

import pytest

from tests.support.budgets import LIMIT, budget_of, wrong_marks

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


def test_a_part_of_the_cases_says_nothing_of_a_mark_that_is_too_large():
    assert wrong_marks([(NAME, 20.0, 1.0)], 1, all_ran=False) == []
    assert wrong_marks([(NAME, 20.0, 90.0)], 1, all_ran=False)
    assert wrong_marks([(NAME, 20.0, 1.0)], 1, skipped={NAME}) == []
    assert wrong_marks([(NAME, 20.0, 90.0)], 1, skipped={NAME})


@pytest.mark.slow(1)
def test_no_test_asks_for_the_date():
    """A test that reads the calendar may pass today and fail tomorrow, and a bisection would ask other tests."""
    calendar = ("date.today", "datetime.today", "datetime.now", "datetime.utcnow", "time.localtime", "time.gmtime")
    tests = Path(__file__).parents[1]
    found = [
        f"{file.relative_to(tests)}:{node.lineno}"
        for file in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(calendar)
    ]
    assert not found, found
