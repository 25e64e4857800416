"""Checkpoints by time, beside those by steps."""

from unittest import mock

import pytest

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.checkpoint.save import SaveClock
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.runs import change, newest_run


def saved(recipe, **checkpoint) -> list[int]:
    """The steps of six after which a run saves."""
    assert train(change(recipe, steps=6, checkpoint={"keep_last": 0, **checkpoint})) == 0
    return [step_of(folder) for folder in list_checkpoints(newest_run(recipe) / "checkpoints")]


@pytest.mark.slow(1)
def test_a_checkpoint_is_saved_when_interval_or_minutes_is_due(recipe):
    assert saved(recipe, interval=0) == [6]
    assert saved(recipe, interval=4) == [4, 6]
    assert saved(recipe, interval=0, minutes=1e-9) == [1, 2, 3, 4, 5, 6]
    assert saved(recipe, interval=4, minutes=1000.0) == [4, 6]


def test_the_clock_asks_once_and_counts_anew_after_each_checkpoint():
    with mock.patch("time.monotonic") as now:
        now.return_value = 0.0
        clock = SaveClock(2)
        now.return_value = 119.0
        assert not clock.asks()
        clock.restart()  # a checkpoint for another reason
        now.return_value = 238.0
        assert not clock.asks()
        now.return_value = 239.0
        assert clock.asks() and not clock.asks()
        clock.restart()
        now.return_value = 359.0
        assert clock.asks()
        endless = SaveClock(None)
        now.return_value = 1e12
        assert not endless.asks()


def test_minutes_must_be_more_than_0(recipe):
    with pytest.raises(UserError, match=r"checkpoint.minutes=0 is out of range; use more than 0"):
        change(recipe, checkpoint={"minutes": 0}).validate()
