"""Single ranks of jobs of any size, built without memory, hold what `dtgpt plan` says of them."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.config.plan import Plan
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.planning.memory import memory_of
from dtgpt.train.start import load_recipe
from tests.support import bodies_dryrun, one_rank
from tests.support.one_rank import build_rank, differences
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(7)

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = str(RECIPES / "gpt2_tiny.py")
GPT2 = GPT2Config(num_layers=8, hidden_size=40, num_heads=5, seq_length=40, vocab_size=257)  # 384 rows: 77 or 76 by tp5
LLAMA = LlamaConfig(
    num_layers=9, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=44, seq_length=16,
    vocab_size=600, qk_norm=True,
)  # fmt: skip
OWN = {"own": Plan(dp=2, tp=2, table={"blocks.3.mlp.gate_up": None, "blocks.3.mlp.down": None})}


def settings_of(recipe, world: int, plan: str, model, **changes):
    changes = {"device": "auto", "micro_batch_size": 2, "global_batch_size": 240, "plans": OWN} | changes
    return replace(recipe, plan=plan, model=model, **changes).planned(world)


@pytest.mark.parametrize(
    "model, plan, world, changes",
    [
        (GPT2, "dp", 1, {}),
        (GPT2, "dp", 3, {}),
        (GPT2, "dp", 3, {"precision": "fp32"}),
        (GPT2, "dp", 3, {"micro_batch_size": 80}),  # a single micro-batch
        (GPT2, "dp", 3, {"reduce": "exact"}),
        (GPT2, "dp", 3, {"reduce": "exact", "micro_batch_size": 80}),
        (LLAMA, "zero3", 3, {"reduce": "exact", "micro_batch_size": 80}),
        (GPT2, "tp5_sp_zero1", 15, {}),
        (GPT2, "tp5_sp_zero1", 15, {"reduce": "exact"}),
        (GPT2, "pp4_zero3", 24, {"reduce": "exact"}),
        (GPT2, "tp5_zero1", 15, {"micro_batch_size": 80}),
        (GPT2, "tp5_pp4", 60, {}),
        (GPT2, "pp4_zero3", 24, {}),
        (GPT2, "tp5_pp4_zbv", 60, {}),
        (GPT2, "pp4_zbv_zero1", 12, {}),
        (GPT2, "tp5_sp_pp4_interleaved_zero2", 40, {"precision": "fp16"}),
        (LLAMA, "tp4_zero2", 20, {"recompute": "full"}),
        (LLAMA, "tp4_sp_zero3", 20, {}),
        (LLAMA, "tp4_sp_zero3", 20, {"reduce": "exact"}),
        (LLAMA, "cp2_zero3", 6, {"reduce": "exact"}),
        (LLAMA, "tp2_pp3_interleaved3", 12, {"recompute": "selective"}),
        (replace(LLAMA, tied=True), "tp4_sp_pp3", 36, {}),
        (LLAMA, "own", 4, {}),
    ],
)
def test_what_is_built_is_what_is_planned(recipe, model, plan, world, changes):
    settings = settings_of(recipe, world, plan, model, **changes)
    for rank in sorted({0, world // 2 if settings.plan.pp > 1 else 0, world - 1}):
        built = build_rank(settings, recipe.optimizer, rank)
        assert differences(built, settings) == [] and built.place.rank == rank
        assert built.weights == sum(4 * torch.Size(p.local).numel() for p in built.parameters) > 0


def test_a_rank_alone_holds_what_it_holds_among_others(recipe):
    """Four processes of gloo, with memory, against four ranks without either."""
    recipe = replace(recipe, model=replace(GPT2, num_heads=4), micro_batch_size=1, global_batch_size=12)
    plans = ("dp2_tp2_sp_zero3", "tp2_pp2", "dp2_pp2_interleaved_zero1", "dp2_pp2_zbv")
    seen = pool().run(4, bodies_dryrun.built, [replace(recipe, plan=plan) for plan in plans])
    for rank, held in enumerate(seen):
        for plan, real in zip(plans, held, strict=True):
            settings = replace(recipe, plan=plan).planned(4)
            built = build_rank(settings, recipe.optimizer, rank)
            assert (built.parameters, built.groups) == (real.parameters, real.groups), plan
            assert (built.bytes(), built.padding, built.blocks) == (real.bytes(), real.padding, real.blocks), plan
            assert memory_of(settings, rank).weights == real.weights, plan


@pytest.mark.parametrize(
    "name, options, ranks", [("gpt3_175b", "--rampup_batch_size none", (0, 9000)), ("llama31_405b", "", (9000, 16383))]
)
def test_any_rank_of_16384_is_built_in_seconds(name, options, ranks):
    recipe = load_recipe(RECIPES / f"{name}.py", [*options.split(), "--global_batch_size", "2048"])
    settings = recipe.planned(16384)
    begin = time.process_time()
    for rank in ranks:
        built = build_rank(settings, recipe.optimizer, rank)
        assert differences(built, settings) == []
        assert [len(ranks) for ranks in built.groups.values()] == [8, 128, 16, 2][: 3 if rank == 9000 else 4]
    assert time.process_time() - begin < 30  # 3 on a machine of one's own


def test_a_rank_that_differs_from_its_plan_is_seen(recipe, monkeypatch):
    """Here it is planning that forgets a parameter."""
    settings = settings_of(recipe, 8, "tp2_pp2", replace(GPT2, num_heads=4))
    built, known = one_rank.build_rank(settings, recipe.optimizer, 5), one_rank.parameters_of
    assert differences(built, settings) == []
    monkeypatch.setattr(one_rank, "parameters_of", lambda *given: known(*given)[1:])
    found = differences(built, settings)
    assert found[0].startswith("bytes of weights, fp32: built ") and ".weight: built with " in found[-1]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--plans dp tp2 --inference_slots 4", "--inference_slots is about one plan, but --plans make a table"),
        ("--plans dp --plan tp2", "--plan tp2 and --plans are both given; name all plans in --plans"),
        ("--world 1 2 --inference_slots 4", "--inference_slots is about one plan, but several"),
        ("--world 0", "--world=0 is out of range; use 1 or more"),
        ("--world 4 two", "--world two is not a whole number"),
        ("--plans dp tp2_zreo1", "did you mean zero1?"),
        ("--plans tp3 tp7 --world 4", "needs tp=3 = 3 processes for each replica, but --world is 4"),
    ],
)
def test_options_that_make_no_sense_get_a_sentence(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["plan", TINY, *words.split()])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and sentence in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""
