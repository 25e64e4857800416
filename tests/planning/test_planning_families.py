"""`dtgpt plan` of blocks whose norms sum over tensor-parallel ranks, and of windows, against what ranks send."""

from dataclasses import replace

import pytest

from tests.planning.test_planning import check_messages
from tests.support.families import OURS


@pytest.mark.slow(3)
def test_the_messages_are_those_that_are_sent(recipe):
    cases = ("olmo3", "tp2", "none"), ("olmo3", "tp2_sp", "full"), ("gpt_oss", "tp2_sp", "none")
    models = {family: replace(OURS[family], num_layers=3) for family, *_ in cases}
    recipe = replace(recipe, micro_batch_size=2)
    check_messages([replace(recipe, model=models[f], plan=plan, recompute=again) for f, plan, again in cases], 2)
