"""Entries of a checkpoint that the core writes, checked."""

from typing import Any

from dtgpt.models.config import ModelConfig
from dtgpt.optim.update import EMPTY
from dtgpt.train.interval_loss import KEY, TOTALS
from dtgpt.util.field_types import is_finite


def check_empty_steps(count: Any, config: ModelConfig) -> None:
    """Raise ValueError where this is not a number of steps."""
    if type(count) is not int or not 0 <= count < 1 << 62:
        raise ValueError(f"{EMPTY} must be a whole number")


def check_interval(saved: Any, config: ModelConfig) -> None:
    """Raise ValueError, TypeError or KeyError where this is no interval that `IntervalLoss.state` returned."""
    counts = type(saved["steps"]) is type(saved["copies"]) is int and saved["steps"] >= 0 < saved["copies"]
    if not counts or not is_finite(saved["sum"]):
        raise ValueError(f"{KEY} needs a finite sum, and whole numbers of copies and steps")
    if not all(is_finite(total) for total in saved.get(TOTALS, [])):
        raise ValueError(f"{KEY}.{TOTALS} needs finite sums")
