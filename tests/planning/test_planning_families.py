"""`dtgpt plan` of blocks whose norms sum over tensor-parallel ranks, and of windows, against what ranks send."""

from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.planning.traffic import collectives_of
from tests.support import bodies_dryrun
from tests.support.families import OURS
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(4)

CPU = torch.device("cpu")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family, plan", [("olmo3", "tp2"), ("olmo3", "tp2_sp"), ("gpt_oss", "tp2_sp")])
def test_the_messages_are_those_that_are_sent(recipe, family, plan, recompute):
    recipe = replace(recipe, model=OURS[family], plan=plan, micro_batch_size=2, recompute=recompute)
    known = parse_plan(plan)
    known = known.for_world(known.world)
    seen = pool().run(known.world, bodies_dryrun.messages, recipe)
    for rank in range(known.world):
        expected: dict[str, int] = {}
        for c in collectives_of(recipe.settings(known, CPU), rank):
            kind = c.kind.replace("-", "_")
            expected[kind] = expected.get(kind, 0) + c.count
        assert {kind: seen[rank].get(kind, 0) for kind in expected} == expected, rank
