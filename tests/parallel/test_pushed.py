"""Gradients and weights that ranks copy to each other's memory: what gloo sends."""

import pytest

from dtgpt.parallel import pushed_shards
from tests.support.bodies_pushes import pushed_and_not
from tests.support.ranks import pool


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("plan", ["dp2", "dp2_zero1", "dp2_zero2", "dp2_zero3"])
def test_two_ranks_push_what_gloo_sends_bit_for_bit(tmp_path, plan, micro_batches):
    for same, worst, sizes in pool().run(2, pushed_and_not, tmp_path, plan, micro_batches):
        assert same, worst
        assert len(sizes) == 1
