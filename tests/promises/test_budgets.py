"""Marks of slow tests are compared with what the tests take."""

from types import SimpleNamespace

import pytest

from tests.support.budgets import LIMIT, budget_of, wrong_marks
from tests.support.turns import DAY, take_turns

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
    phases = [(NAME, budget, True, seconds / 2)] * 2
    assert wrong_marks(phases, times) == ([f"{NAME} {told}"] if told else [])


def test_a_part_of_the_cases_says_nothing_of_a_mark_that_is_too_large():
    assert wrong_marks([(NAME, 20.0, False, 1.0)], 1) == []
    assert wrong_marks([(NAME, 20.0, False, 90.0)], 1)


class Item:
    """A test as pytest collects it: a case of a function with the mark, or of a file with it."""

    def __init__(self, nodeid: str, by: str):
        self.nodeid, self.added = nodeid, []
        self.marked = {"file": SimpleNamespace(nodeid="tests/test_a.py"), "function": self}.get(by)

    def iter_markers_with_node(self, name):
        return iter([(self.marked, pytest.mark.turns(3).mark)] if self.marked else [])

    def add_marker(self, mark):
        self.added.append(mark.name)


def test_what_shares_a_mark_takes_turns_by_day(monkeypatch):
    turns = []
    for day in range(739946, 739949):
        monkeypatch.setenv(DAY, str(day))
        cases = [Item(f"tests/test_a.py::test_plan[{n}]", "function") for n in range(4)]
        others = [Item(f"tests/test_a.py::test_{n}", "file") for n in range(3)]
        left_out = take_turns([*cases, Item("tests/test_a.py::test_free", "nothing"), *others])
        turns += [item.nodeid.partition("::")[2] for item in (*cases, *others) if not item.added]
        assert left_out == [item for item in (*cases, *others) if item.added == ["long"]]
        assert sum(not item.added for item in others) == 1
    assert sorted(turns) == ["test_0", "test_1", "test_2", *(f"test_plan[{n}]" for n in range(4))]


def test_what_is_asked_for_by_name_runs_on_any_day(monkeypatch):
    monkeypatch.setenv(DAY, "")
    assert take_turns([Item(f"tests/test_a.py::test_plan[{n}]", "function") for n in range(4)]) == []
