"""How a model is cut into stages, and what comes out of them in a row."""

import functools
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan import SCHEDULES, ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.stages import block_ranges, keep_stage
from dtgpt.util import seams
from tests.support.bodies_shards import CPU, KEY, gradients_by_places, logits_of_stages
from tests.support.ranks import pool
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(7)

TINY = GPT2Config(num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)
PLANS = [ResolvedPlan(dp=1, pp=pp, schedule=schedule) for pp in (2, 3, 4) for schedule in SCHEDULES.values()]
PLANS += [
    ResolvedPlan(dp=1, pp=2, blocks_per_stage=(9, 3)),
    ResolvedPlan(dp=1, pp=2, schedule="Interleaved1F1B", stages_per_rank=6),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_stages_have_every_block_once_in_order(plan):
    config = replace(TINY, num_layers=12)
    ranges = block_ranges(config, plan)
    assert len(ranges) == plan.num_stages and all(ranges)
    assert [block for r in ranges for block in r] == list(range(12))
    if plan.blocks_per_stage:
        assert tuple(map(len, ranges)) == plan.blocks_per_stage


def test_without_what_balances_them_stages_have_about_equally_many_blocks(monkeypatch):
    monkeypatch.setattr(seams, "ask", lambda seam, question: None)
    ranges = block_ranges(replace(TINY, num_layers=14), ResolvedPlan(dp=1, pp=4))
    assert [len(r) for r in ranges] == [3, 4, 3, 4] and [b for r in ranges for b in r] == list(range(14))


def test_stages_go_round_the_ranks_in_turn_or_like_the_letter_v():
    interleaved, zbv = (
        ResolvedPlan(dp=1, pp=4, schedule=schedule, stages_per_rank=lap)
        for schedule, lap in (("Interleaved1F1B", 3), ("ZBVZeroBubble", 2))
    )
    assert [interleaved.stage_rank(s) for s in range(12)] == [0, 1, 2, 3] * 3
    assert [zbv.stage_rank(s) for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [RankCoordinates(zbv, rank).stages for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [RankCoordinates(interleaved, rank).stages for rank in (0, 3)] == [[0, 4, 8], [3, 7, 11]]


@pytest.mark.parametrize("plan", PLANS[:8], ids=lambda plan: plan.name)
def test_the_parameters_of_all_stages_are_those_of_the_model_by_name(plan):
    config = replace(TINY, num_layers=8)
    with torch.device("meta"):
        whole = {name: p.shape for name, p in unique_parameters(Decoder(config)).items()}
        parts = [unique_parameters(keep_stage(Decoder(config), stage, plan)) for stage in range(plan.num_stages)]
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted([*whole, TABLE])  # the table is on the first and on the last stage
    assert TABLE in parts[0] and TABLE in parts[-1]
    assert all(p.shape == whole[name] for part in parts for name, p in part.items())
    for blocks, part in zip(block_ranges(config, plan), parts, strict=True):
        held = {int(name.split(".")[1]) for name in part if name.startswith("blocks.")}
        assert held == set(blocks)
    assert "embedding.wpe.weight" in parts[0] and "head.ln_f.weight" in parts[-1]


def test_stages_in_a_row_are_the_model():
    """With the dropout keys of the whole model, of which a stage takes those of its blocks."""
    config = replace(TINY, dropout=0.2)
    whole = build_model(config, CPU, torch.float32, KEY)
    keys = torch.arange(3 * config.num_sites * 2).reshape(3, config.num_sites, 2)
    x = tokens = torch.randint(257, (3, 16))
    plan = ResolvedPlan(dp=1, pp=4)
    for stage in range(4):
        part = keep_stage(build_model(config, CPU, torch.float32, KEY), stage, plan)
        x = part(x, keys)
    assert torch.equal(x, whole(tokens, keys))
    assert not torch.equal(x, whole(tokens))


@functools.cache
def whole_logits(config: GPT2Config, tokens: bytes) -> torch.Tensor:
    model = build_model(config, CPU, torch.float32, KEY)
    with torch.no_grad():
        return model(torch.frombuffer(bytearray(tokens), dtype=torch.int64).reshape(-1, config.seq_length))


@pytest.mark.parametrize("name, world", [
    ("pp2", 2), pytest.param("pp2_gpipe", 2, marks=pytest.mark.long),
    pytest.param("pp2_interleaved", 2, marks=pytest.mark.long), ("pp2_interleaved4", 2),
    pytest.param("pp2_zbv", 2, marks=pytest.mark.long), pytest.param("tp2", 2, marks=pytest.mark.long), ("tp2_sp", 2),
    ("dp2_zero3", 2), ("pp3_zbv", 3), ("tp2_sp_pp2_zbv", 4)
])  # fmt: skip
def test_every_layout_of_stages_has_the_logits_of_the_whole_model(recipe, name, world):
    """Batches of another size than a micro-batch too, as the last one of an evaluation is."""
    plan = parse_plan(name).for_world(world)
    config = replace(TINY, num_layers=max(4, plan.num_stages))
    recipe = replace(recipe, model=config, micro_batch_size=2, global_batch_size=2 * 4 * plan.dp)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(257, (size, 16), generator=generator) for size in (2, 3, 1)]
    answers = pool().run(world, logits_of_stages, recipe, plan, batches)
    for index, tokens in enumerate(batches):
        expected = whole_logits(config, tokens.numpy().tobytes())
        holders = 0
        for rank, answer in enumerate(answers):
            place, logits = RankCoordinates(plan, rank), answer[index]
            if logits is None:
                continue
            holders += 1
            columns = chunk(range(config.padded_vocab_size), plan.tp, place.tp)
            part = expected[..., columns.start : columns.stop]
            torch.testing.assert_close(logits, part, rtol=1e-4, atol=1e-6)
        assert holders == plan.dp * plan.tp


@pytest.mark.parametrize(("name", "world", "places"), [
    ("pp2", 2, 2), ("pp2_interleaved", 2, 4), ("pp3_zbv", 3, 6)
])  # fmt: skip
def test_micro_batches_that_share_places_have_the_same_bits(recipe, name, world, places):
    """As with a place for each micro-batch of the step, which memory has not for 1,536."""
    plan = parse_plan(name).for_world(world)
    batch = 8 if "interleaved" in name else 7
    recipe = replace(recipe, model=replace(TINY, num_layers=6), micro_batch_size=1, global_batch_size=batch)
    for answers in pool().run(world, gradients_by_places, recipe, plan):
        (loss, gradients, few), *others = answers
        assert few == {places} and others[-1][2] == {batch}
        for other, same, _ in others:
            assert torch.equal(loss, other) and all(map(torch.equal, gradients, same))
        assert any(gradient.any() for gradient in gradients)
