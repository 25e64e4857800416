"""`--reduce exact_tp` under plans drawn at random: the pieces of each sum, in order, are those of one process."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from dtgpt.compare.fuzz.drawing import Draws, draw_plan
from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.models.binding import bound_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.exact_tp import build
from dtgpt.parallel.exact_tp.tree import Share
from dtgpt.util.errors import UserError
from tests.support.example_mixture import ManyConfig
from tests.support.one_rank import open_one_rank

SHAPE = {
    "num_layers": 4, "hidden_size": 48, "num_heads": 8, "num_kv_heads": 8, "head_dim": 6, "seq_length": 16,
    "vocab_size": 257, "ffn_hidden_size": 40,
}  # fmt: skip
MODELS = [
    GPT2Config(num_layers=4, hidden_size=48, num_heads=8, seq_length=16, vocab_size=257),
    LlamaConfig(**SHAPE, qk_norm=True),
    OlmoeConfig(**SHAPE, num_experts=8, experts_per_token=2),
    ManyConfig(**SHAPE, num_experts=8, experts_per_token=2),
]
RANKS, DRAWN = 8, 10


def pieces_of(stage: Decoder, place: int) -> Iterator[tuple[str, range]]:
    """Yield the name of each module of a stage that computes in pieces, and those that this rank has."""
    for name, module in stage.named_modules():
        bound = bound_of(module)
        for kind, found in (("product", bound.product), ("loss", bound.loss), ("run", bound.run)):
            share = share_of(found)
            if share is not None:
                number, first = (share, share * place) if isinstance(share, int) else (share.number, share.first)
                yield f"{name} {kind}", range(first, first + number)


def share_of(found: Any) -> Share | int | None:
    """Return what a function that is bound knows of pieces: a rank's share, or how many it has."""
    if isinstance(found, partial):
        return next((share for each in found.args if (share := share_of(each)) is not None), None)
    if isinstance(found, Share) or type(found) is int:
        return found
    return getattr(found, "positions", None) or getattr(found, "share", None)


def pieces_under(settings: Any, plan: ResolvedPlan) -> dict[str, list[int]]:
    """Return the pieces of each module, those of one tp rank behind those of the other."""
    found: dict[str, list[int]] = {}
    ranks = [rank for rank in range(plan.world) if rank // plan.tp % plan.data_ranks == 0]
    for rank in ranks:
        with open_one_rank(plan, rank) as mesh:
            stages, _ = build_stages(replace(settings, plan=plan), mesh, key=None)
            for name, own in (each for stage in stages for each in pieces_of(stage, mesh.place.tp)):
                # Between matrices ranks have all positions, unless they cut the sequence.
                whole = name.endswith(" run") and not plan.sequence_parallel
                found.setdefault(name, []).extend(own if not whole or mesh.place.tp == 0 else ())
    return found


def drawn_plans(recipe: Any) -> Iterator[ResolvedPlan]:
    """Yield plans with tp that the recipe takes."""
    for index in range(400):
        try:
            plan = draw_plan(Draws(7, index), RANKS)
            resolved = replace(recipe, plan="drawn", plans={"drawn": plan}).plan_for(plan.world)
        except UserError:
            continue
        if resolved.tp > 1:
            yield resolved


@pytest.mark.slow(5)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
def test_pieces_and_their_order_do_not_depend_on_the_plan(recipe, model: ModelConfig):
    recipe = replace(recipe, model=model, micro_batch_size=2, global_batch_size=16, reduce="exact_tp", precision="fp32")
    one = Plan(dp=1).for_world(1)
    settings = recipe.settings(one, torch.device("meta"))
    expected = pieces_under(settings, one)
    assert sum(len(own) > 1 for own in expected.values()) > 4 * model.num_layers
    assert all(own == list(range(len(own))) for own in expected.values())
    plans = {plan.name: plan for plan in drawn_plans(recipe)}
    assert len(plans) > DRAWN
    for name in list(plans)[:DRAWN]:
        assert pieces_under(settings, plans[name]) == expected, name


def test_pieces_that_follow_from_the_plan_show(recipe):
    recipe = replace(recipe, model=MODELS[0], micro_batch_size=2, global_batch_size=16, reduce="exact_tp")
    settings = recipe.settings(Plan(dp=1).for_world(1), torch.device("meta"))
    two = Plan(dp=1, tp=2, sequence_parallel=True).for_world(2)
    expected = pieces_under(settings, two)
    with mock.patch.object(build, "values_of", lambda settings: mock.Mock(pieces=settings.plan.tp)):
        found = pieces_under(settings, two)
    assert [name for name in expected if found[name] == expected[name]] == []
