"""Entries of a checkpoint that the core writes, checked."""

from typing import Any

from dtgpt.models.config import ModelConfig
from dtgpt.train.interval_loss import KEY, TOTALS
from dtgpt.util.field_types import is_finite


def check_interval(saved: Any, config: ModelConfig) -> None:
    """Raise ValueError, TypeError or KeyError where this is no interval that `IntervalLoss.state` returned."""
    counts = type(saved["steps"]) is type(saved["copies"]) is int and saved["steps"] >= 0 < saved["copies"]
    if not counts or not is_finite(saved["sum"]):
        raise ValueError(f"{KEY} needs a finite sum, and whole numbers of copies and steps")
    if not all(is_finite(total) for total in saved.get(TOTALS, [])):
        raise ValueError(f"{KEY}.{TOTALS} needs finite sums")
