"""Runs of a LLaMA: checkpoints of one plan under another, what is computed again, models to begin with."""

from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.llama import LlamaConfig
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.start import settle
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import load_each, train_and_save
from tests.support.bodies_train import train_until
from tests.support.ranks import each, pool
from tests.support.runs import change, losses, newest_run, record

pytestmark = pytest.mark.slow(5)


@pytest.fixture
def llama(recipe):
    model = LlamaConfig(
        num_layers=4, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=44, seq_length=16,
        vocab_size=257, dropout=0.1, qk_norm=True,
    )  # fmt: skip
    recipe = replace(recipe, model=model, micro_batch_size=2, global_batch_size=4, steps=4)
    return change(recipe, log={"eval_interval": 4})


def test_a_plan_reads_what_another_wrote(llama, tmp_path):
    """Bit by bit: an output projection of its own and norms of heads, too."""
    folders = [tmp_path / plan for plan in ("tp2_pp2", "dp2_zero3")]
    for folder in folders:
        folder.mkdir()
        plan = parse_plan(folder.name)
        pool().run(plan.world, train_and_save, replace(llama, plan=folder.name), folder, 2, 100)
    for plan, precision in (("tp4_sp", "bf16"), ("pp2_zbv", "fp32")):
        world, target = parse_plan(plan).world, replace(llama, plan=plan, precision=precision)
        assert pool().run(world, load_each, target, folders) == [{}] * world


def test_a_run_that_was_stopped_under_one_plan_goes_on_under_another(llama, tmp_path):
    train(replace(llama, plan="single"))
    whole = newest_run(llama)
    recipe = replace(llama, runs=str(tmp_path / "parted"), plan="tp2_sp")
    assert pool().run(2, train_until, recipe, 2, 1) == [128 + 15] * 2
    run = newest_run(recipe)
    assert pool().run(2, train, replace(recipe, plan="pp2_zbv", resume=str(run))) == [0] * 2
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    held_out = [
        [r["validation_loss"] for r in read_records(r / "metrics.jsonl") if "validation_loss" in r]
        for r in (run, whole)
    ]
    assert len(held_out[0]) == 1 and held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    samples = [(r / "samples" / "step_00000004.txt").read_bytes() for r in (run, whole)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    "plan, precision", [("single", "bf16"), pytest.param("tp2_sp", "fp32", marks=pytest.mark.long)]
)
def test_what_is_computed_again_is_the_same_to_the_last_bit(llama, plan, precision):
    recipe = replace(llama, plan=plan, precision=precision)
    cases = [replace(recipe, recompute=again) for again in ("none", "selective", "full")]
    expected, *others = each(record, cases, 2) if plan == "single" else pool().run(2, each, record, cases, 2)[0]
    for found in others:
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_a_run_begins_with_another_of_any_length_but_of_no_other_architecture(recipe, llama, tmp_path):
    llama = change(llama, steps=1, log={"sample_tokens": 0})
    train(llama)
    run = newest_run(llama)
    longer = settle(change(llama, model={"num_kv_heads": 2, "qk_norm": False}), {
        "init_from": [str(run)], "model.seq_length": ["40"], "runs": [str(tmp_path / "longer")],
    })  # fmt: skip
    assert longer.model == replace(llama.model, seq_length=40)
    assert train(longer) == 0
    with pytest.raises(UserError, match="holds a llama, and the recipe's model is a gpt2; give another"):
        settle(recipe, {"init_from": [str(run)]})
    with pytest.raises(UserError, match="holds a llama, and the recipe's model is a gpt2; give another"):
        train(replace(recipe, resume=str(run)))
