"""Gradients and weights that ranks copy to each other's memory: what gloo sends."""

import pytest

from dtgpt.parallel.shared_memory import scatter
from dtgpt.planning import memory
from tests.support.bodies_pushes import ROOM, pushed_and_not, settings_of
from tests.support.ranks import pool


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan, micro_batches", [
    ("dp2", 1), ("dp2", 2), ("dp2_zero1", 2), ("dp2_zero2", 1), ("dp2_zero2", 2), ("dp2_zero3", 2)
])  # fmt: skip
def test_two_ranks_push_what_gloo_sends_bit_for_bit(tmp_path, monkeypatch, plan, micro_batches):
    for same, worst, count in pool().run(2, pushed_and_not, tmp_path, plan, micro_batches):
        assert same, worst
        assert count["shared"] == 1 and count["met"] >= 2 * 2 * 4
        if "zero" in plan:
            settings = settings_of(plan, micro_batches, 2)
            monkeypatch.setattr(scatter, "ROOM", ROOM)
            planned = memory.memory_of(settings, 0).gathered
            assert count["bytes"] == pytest.approx(planned, rel=0.05)


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan, micro_batches", [("dp3", 1), ("dp2_zero1", 1), ("dp3_zero3", 1), ("dp2_zero2", 2)])
def test_exact_sums_are_pushed(tmp_path, plan, micro_batches):
    for same, worst, count in pool().run(int(plan[2]), pushed_and_not, tmp_path, plan, micro_batches, "exact"):
        assert same, worst
        assert count["shared"] == 1 + ("zero" in plan) and count["met"] >= 2 * 2 * 4


@pytest.mark.slow(1)
@pytest.mark.parametrize("plan", ["dp3", "dp3_zero3"])
def test_uneven_parts_of_three_ranks_are_pushed(tmp_path, plan):
    """Sums of three ranks have another order than gloo's."""
    for _, worst, count in pool().run(3, pushed_and_not, tmp_path, plan, 1):
        assert worst < 1e-3 and count["met"] > 0


@pytest.mark.slow(1)
def test_pairs_of_ranks_push_for_each_stage_of_a_pipeline(tmp_path):
    for same, worst, count in pool().run(4, pushed_and_not, tmp_path, "dp2_pp2_zero1", 2):
        assert same, worst
        assert count["shared"] == 1 and count["met"] > 0
