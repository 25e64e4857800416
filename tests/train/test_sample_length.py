"""Samples with fewer tokens than the model has positions."""

from dataclasses import replace

import pytest
import torch

from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.planning.memory import memory_of
from dtgpt.planning.traffic import sent_bytes
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support import bodies_architecture
from tests.support.ranks import each, pool
from tests.support.runs import newest_run

LLAMA = LlamaConfig(
    num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=48, seq_length=8,
    vocab_size=257, dropout=0.1,
)  # fmt: skip
STEPS = 2


@pytest.fixture
def short(recipe):
    """Half of the positions of a GPT-2, which learns them."""
    model = GPT2Config(num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, dropout=0.1)
    return replace(recipe, model=model, seq_length=8, micro_batch_size=2, global_batch_size=8, plan="single")


@pytest.mark.slow(3)
def test_every_plan_follows_one_process(short):
    short = replace(short, global_batch_size=4)
    expected, reference = bodies_architecture.train_other(short, STEPS)[:2]
    cases = [replace(short, plan=plan) for plan in ("dp2_zero3", "tp2_sp", "pp2_zbv")]
    for losses, weights, *_ in pool().run(2, each, bodies_architecture.train_other, cases, STEPS)[0]:
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, whole in weights.items():
            torch.testing.assert_close(whole, reference[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow(2)
def test_positions_that_no_sample_has_change_no_bit(recipe):
    """Of a model that does not learn them: samples, masks, messages and sums are those of a model without them."""
    made = replace(recipe, model=LLAMA, micro_batch_size=2, global_batch_size=4)
    longer = replace(made, model=replace(LLAMA, seq_length=32), seq_length=8)
    cases = [replace(recipe, plan=plan) for plan in ("tp2_sp", "pp2") for recipe in (made, longer)]
    found = pool().run(2, each, bodies_architecture.train_other, cases, STEPS)[0]
    for (losses, weights, *_), (expected, whole, *_) in (found[:2], found[2:]):
        assert losses == expected
        assert all(torch.equal(weights[name], whole[name]) for name in whole)


@pytest.mark.parametrize("plan", ["tp2_sp", "pp2", "dp2_zero3"])
def test_the_plan_counts_the_tokens_of_samples(recipe, plan):
    sizes = {"plan": plan, "micro_batch_size": 2, "global_batch_size": 8}
    made = replace(recipe, model=LLAMA, **sizes).planned(None)
    longer = replace(recipe, model=replace(LLAMA, seq_length=32), seq_length=8, **sizes).planned(None)
    assert memory_of(longer, 0) == memory_of(made, 0)
    assert sent_bytes(longer, 0) == sent_bytes(made, 0)


def test_a_run_records_its_tokens_and_resumes_with_samples_of_that_length_alone(short, capsys):
    made = replace(short, steps=2)
    train(made)
    run = newest_run(made)
    assert "2 steps of 8 x 8 tokens" in capsys.readouterr().out
    assert [record["tokens"] for record in read_records(run / "metrics.jsonl") if "loss" in record] == [64, 128]
    with pytest.raises(UserError, match="was trained on samples of 8 tokens, not 16; leave --seq_length out, or"):
        train(replace(made, steps=3, seq_length=None, resume=str(run)))
    train(replace(made, steps=3, resume=str(run)))
    assert list(read_records(run / "metrics.jsonl"))[-1]["step"] == 3


@pytest.mark.parametrize("length, plan, told", [
    (17, "single", "seq_length=17 is more than the model's positions, model.seq_length=16; use --seq_length 16"),
    (7, "tp2_sp", r"^seq_length=7 cannot be split over tp=2 under .* \(1 left over\); use --seq_length 6"),
])  # fmt: skip
def test_lengths_that_cannot_be_trained_with(short, length, plan, told):
    with pytest.raises(UserError, match=told):
        recipe = replace(short, seq_length=length, plan=plan)
        recipe.validate()
        recipe.planned(None)
