"""Low-rank adapters: training under every plan, checkpoints, merged models and peft's form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import dtgpt
from dtgpt.checkpoint.adapter import SavedAdapter
from dtgpt.checkpoint.manifest import Checkpoint, list_checkpoints
from dtgpt.commands.convert import ConvertOptions, convert
from dtgpt.config.lora import LoraConfig
from dtgpt.config.plan_names import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.interop.hf.peft import CONFIG, WEIGHTS, save_peft
from dtgpt.interop.open import open_config, open_source, with_adapter
from dtgpt.models.source import load_model, parameter_shapes
from dtgpt.train.startup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_lora import train_adapters
from tests.support.ranks import pool

STEPS, RANK = 4, 4
LORA = LoraConfig(rank=RANK, alpha=16.0)
SIZES = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = torch.arange(24).view(2, 12) * 10


def save_base(kind: str, folder: Path, seed: int = 0) -> Path:
    """A model as transformers saves it, with weights that matter."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA))
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=16)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=["llama", "gpt2"])
def kind(request):
    return request.param


@pytest.fixture
def lora(recipe, kind, tmp_path):
    """A run that trains adapters on a base, without dropout for LLaMA, with it for GPT-2."""
    base = save_base(kind, tmp_path / "base")
    config = replace(open_config(base), dropout=0.0 if kind == "llama" else 0.1)
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1)
    return replace(recipe, model=config, init_from=str(base), lora=LORA, optimizer=optimizer, steps=STEPS)


@pytest.mark.parametrize("kind", ["llama", "gpt2"], indirect=True)
def test_every_plan_follows_one_process_and_goes_on_where_another_stopped(lora, kind, tmp_path):
    losses, weights = train_adapters(lora, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.05
    assert all(name.endswith((".lora.a", ".lora.b")) for name in weights)
    assert len(weights) == 2 * 4 * 2  # A and B of four matrices in two blocks
    plans = {"llama": ["tp2", "tp2_sp", "pp2"], "gpt2": ["tp2_sp", "dp2_zero3"]}[kind]
    for plan in plans:
        found = pool().run(parse_plan(plan).world, train_adapters, replace(lora, plan=plan), tmp_path / plan, 2)[0][0]
        run = tmp_path / plan
        found += train_adapters(replace(lora, micro_batch_size=2), run, STEPS)[0]  # as one process
        assert found == pytest.approx(losses, abs=1e-6), plan
