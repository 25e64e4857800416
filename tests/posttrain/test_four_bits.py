"""Adapters beside a base in 4 bits (QLoRA)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from tests.support.bodies_lora import codes_of, train_and_save
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(8)

STEPS = 3
LORA = LoraConfig(rank=4, alpha=16.0, bits=4)
SIZES = {
    "vocab_size": 257, "bos_token_id": None, "eos_token_id": None, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = (torch.arange(24) * 10).view(2, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model as transformers saves it, with weights that matter."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def qlora(recipe, base):
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1, eps=1e-5)
    return replace(recipe, model=open_config(base), init_from=str(base), lora=LORA, optimizer=optimizer, steps=STEPS)


def test_every_plan_has_the_same_base_and_goes_on_where_another_stopped(qlora, tmp_path):
    losses, weights = train_and_save(qlora, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.01
    assert all(name.endswith((".lora.a", ".lora.b")) for name in weights)
    ((expected, planned, held),) = pool().run(1, codes_of, qlora)
    assert planned == held
    assert len(expected) == 3 * 4 * 2
    for plan in ("dp2", "dp2_zero3", "dp2_zero2", "tp2", "pp2"):
        other, world = replace(qlora, plan=plan), parse_plan(plan).world
        found = pool().run(world, codes_of, other)[0][0]
        assert found.keys() == expected.keys()
        for name in found:
            assert torch.equal(found[name], expected[name]), (plan, name)
        run = tmp_path / plan
        followed = pool().run(world, train_and_save, other, run, 2)[0][0]
        followed += train_and_save(replace(qlora, init_from=None), run, STEPS)[0]
        assert followed == pytest.approx(losses, abs=1e-6), plan
