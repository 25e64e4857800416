"""A rank that loads takes hardly more memory than what it owns, however the checkpoint was cut.

Measured is RssAnon of /proc/self/status, its peak while a rank loads over what it was before, when all that the rank
owns was resident already. Pages of the mapped files are not in it: they are the page cache's, shared by all ranks of a
node and taken back by the kernel when memory is short.
"""

import sys

import pytest

from tests.support.bodies_checkpoint import memory_of_loading, save_at_once
from tests.support.ranks import pool
from tests.support.runs import change

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow(3)]
BOUND = 1.3


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where the checkpoint of one process is, once it is made."""
    return tmp_path_factory.mktemp("memory") / "checkpoints"


@pytest.fixture
def recipe(recipe):
    """30 MB of weights, of which each of 4 ranks owns 1/4, as of the moments."""
    shape = {"num_layers": 4, "hidden_size": 320, "num_heads": 4, "vocab_size": 8192}
    return change(recipe, model=shape, micro_batch_size=2)


CASES = [  # with narrow copies, without, and with a reader that takes too much
    ("tp2_pp2", "bf16", False),
    ("dp2_tp2_zero3", "fp32", False),
    ("dp2_tp2_zero1", "fp32", True),
]


@pytest.mark.parametrize("plan, precision, greedy", CASES, ids=["tp2_pp2 bf16", "zero3", "the watch sees more"])
def test_a_rank_that_loads_takes_little_more_than_it_owns(recipe, written, plan, precision, greedy):
    folder = written / "step_00000000"
    if not folder.exists():
        pool().run(1, save_at_once, change(recipe, plan="single"), written)
    answers = pool().run(4, memory_of_loading, change(recipe, plan=plan, precision=precision), folder, greedy)
    whole = 4 * recipe.model.num_parameters * (3.5 if precision == "bf16" else 3)
    for owned, _ in answers:
        assert 0.9 * whole / 4 < owned < whole / 2.3  # the tied table is on both stages
    ratios = [(owned + growth) / owned for owned, growth in answers]
    assert (max(ratios) < BOUND) == (not greedy), ratios
