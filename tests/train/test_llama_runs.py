"""Runs of a LLaMA: checkpoints of one plan under another, what is computed again, models to begin with."""

from dataclasses import replace

import pytest
import torch

from dtgpt.models.llama import LlamaConfig
from dtgpt.train.loop import train
from dtgpt.train.start import settle
from dtgpt.util.errors import UserError
from tests.support.ranks import each, pool
from tests.support.runs import change, newest_run, record

pytestmark = pytest.mark.slow(5)


@pytest.fixture
def llama(recipe):
    model = LlamaConfig(
        num_layers=4, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=44, seq_length=16,
        vocab_size=257, dropout=0.1, qk_norm=True,
    )  # fmt: skip
    recipe = replace(recipe, model=model, micro_batch_size=2, global_batch_size=4, steps=4)
    return change(recipe, log={"eval_interval": 4})


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
