"""Entries of a checkpoint that are not what a run wrote are refused."""

import pytest

from dtgpt.checkpoint.verification.entries import check_interval
from dtgpt.optim.empty_steps.state import check_state


def test_an_interval_is_finite_sums_and_counts():
    check_interval({"sum": 1.0, "copies": 1, "steps": 0}, None)
    wrong = [5, {}, {"sum": "a", "copies": 1, "steps": 1}, {"sum": 1.0, "copies": 0, "steps": 1}]
    for saved in wrong + [{"sum": 1.0, "copies": 1, "steps": n} for n in (-1, True, 1.5, "1")]:
        with pytest.raises((ValueError, TypeError, KeyError)):
            check_interval(saved, None)


def test_a_number_of_steps_is_a_whole_number():
    check_state(3, None)
    for count in (-1, 1.5, True, "1", 1 << 62):
        with pytest.raises(ValueError, match="empty_steps must be a whole number"):
            check_state(count, None)
