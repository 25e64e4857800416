"""`dtgpt plan --rank`: single ranks of jobs of any size, built without memory."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.config.plan import Plan
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.train import one_rank
from dtgpt.train.one_rank import build_rank, differences
from dtgpt.train.settle import load_recipe
from tests.support import bodies_dryrun
from tests.support.ranks import pool

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
        (GPT2, "tp5_sp_zero1", 15, {}),
        (GPT2, "tp5_zero1", 15, {"micro_batch_size": 80}),
        (GPT2, "tp5_pp4", 60, {}),
        (GPT2, "pp4_zero3", 24, {}),
        (GPT2, "tp5_pp4_zbv", 60, {}),
        (GPT2, "pp4_zbv_zero1", 12, {}),
        (GPT2, "tp5_sp_pp4_interleaved_zero2", 40, {"precision": "fp16"}),
        (LLAMA, "tp4_zero2", 20, {"recompute": "full"}),
        (LLAMA, "tp4_sp_zero3", 20, {}),
        (LLAMA, "tp2_pp3_interleaved3", 12, {"recompute": "selective"}),
        (replace(LLAMA, tied=True), "tp4_sp_pp3", 36, {}),
        (LLAMA, "own", 4, {}),
    ],
)
def test_what_is_built_is_what_is_planned(recipe, model, plan, world, changes):
    settings = settings_of(recipe, world, plan, model, **changes)
    for rank in sorted({0, world // 2, world - 1}):
        built = build_rank(settings, recipe.optimizer, rank)
        assert differences(built, settings) == [] and built.place.rank == rank
        assert built.weights == sum(4 * torch.Size(p.local).numel() for p in built.parameters) > 0


@pytest.mark.parametrize("plan", ["dp2_tp2_sp_zero3", "tp2_pp2", "dp2_pp2_interleaved_zero1", "dp2_pp2_zbv"])
def test_a_rank_alone_holds_what_it_holds_among_others(recipe, plan):
    """Four processes of gloo, with memory, against four ranks without either."""
    model = replace(GPT2, num_heads=4)
    recipe = replace(recipe, model=model, plan=plan, micro_batch_size=1, global_batch_size=12)
    seen = pool().run(4, bodies_dryrun.built, recipe)
    for rank, real in enumerate(seen):
        built = build_rank(recipe.planned(4), recipe.optimizer, rank)
        assert (built.parameters, built.groups) == (real.parameters, real.groups)
        assert (built.bytes(), built.padding, built.blocks) == (real.bytes(), real.padding, real.blocks)


@pytest.mark.parametrize("name, options", [("gpt3_175b", "--rampup_batch_size none"), ("llama31_405b", "")])
def test_any_rank_of_16384_is_built_in_seconds(name, options):
    recipe = load_recipe(RECIPES / f"{name}.py", [*options.split(), "--global_batch_size", "2048"])
    settings = recipe.planned(16384)
    begin = time.process_time()
    for rank in (0, 9000, 16383):
        built = build_rank(settings, recipe.optimizer, rank)
        assert differences(built, settings) == []
        assert [len(ranks) for ranks in built.groups.values()] == [8, 128, 16, 2][: 3 if rank == 9000 else 4]
    assert time.process_time() - begin < 15  # 3 on a machine of one's own


def test_a_rank_that_differs_from_its_plan_is_told_and_fails(monkeypatch, capsys):
    """Here it is planning that forgets a parameter."""
    words = ["plan", TINY, "--plan", "tp2_pp2", "--world", "8", "--global_batch_size", "128"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--rank", "5"])
    assert stop.value.code == 0 and "as planned: blocks" in capsys.readouterr().out
    known = one_rank.parameters_of
    monkeypatch.setattr(one_rank, "parameters_of", lambda *given: known(*given)[1:])
    with pytest.raises(SystemExit) as stop:
        main([*words, "--rank", "5"])
    told = capsys.readouterr().out
    assert stop.value.code == 1
    assert "DIFFERS from the plan:\n  bytes of weights, fp32: built " in told and "as planned" not in told
    assert ".weight: built with " in told


def test_the_report_names_coordinates_groups_and_kinds_of_parameters(capsys):
    plan = ["--plan", "tp2_pp2_zero1", "--world", "8", "--global_batch_size", "128"]
    with pytest.raises(SystemExit) as stop:
        main(["plan", TINY, *plan, "--rank", "5", "--gpus_per_node", "2", "--gpu", "H100"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rank    5 of 8: pp 1 of 2, dp 0 of 2, tp 1 of 2; node 2, GPU 1 of 2" in lines
    assert "tp          2 ranks: 4 5; node 2" in lines and "dp          2 ranks: 5 7; 2 nodes" in lines
    assert "pp          2 ranks: 1 5; 2 nodes; receives from 1" in lines
    assert any(line.split()[:2] == ["blocks.*.attn.qkv.weight", "1"] and "tp 0, dp 0" in line for line in lines)
    assert any(line.startswith("fits: ") and "on this rank, H100" in line for line in lines)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--plan tp2 --rank 2", "--rank 2 is not one of the plan's 2 ranks; use 0 to 1"),
        ("--rank -1", "--rank=-1 is out of range; use 0 or more"),
        ("--world 1 2 --rank 0", "--rank is about one plan, but several numbers of --world make a table"),
        ("--plans dp tp2 --rank 0", "--rank is about one plan, but --plans make a table"),
        ("--plans dp --plan tp2", "--plan tp2 and --plans are both given; name all plans in --plans"),
        ("--world 1 2 --inference_slots 4", "--inference_slots is about one plan, but several"),
        ("--rank 0 --inference_slots 4", "leave one of them out"),
        ("--gpus_per_node 4", "add --rank, or leave it out"),
        ("--world 0", "--world=0 is out of range; use 1 or more"),
        ("--world 4 two", "--world two is not a whole number"),
        ("--plans dp tp2_zreo1", "did you mean zero1?"),
        ("--plans tp3 tp7 --world 4", "needs tp=3 = 3 processes for each replica, but --world is 4"),
        ("--rank 0 --world 262144 --global_batch_size 262144 --micro_batch_size 1", "at most 131072 ranks"),
    ],
)
def test_options_that_make_no_sense_get_a_sentence(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["plan", TINY, *words.split()])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and sentence in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""
