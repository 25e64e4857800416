"""Files of peft with numbers that no adapter has."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dtgpt.interop.hf.peft import Peft
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.util.errors import UserError

CONFIG = GPT2Config(num_layers=1, hidden_size=8, num_heads=2, seq_length=4, vocab_size=16)
MODULE = "base_model.model.transformer.h.0.attn.c_attn"


def write(folder, rank=2, **settings):
    save_file(
        {f"{MODULE}.lora_A.weight": torch.ones(rank, 8), f"{MODULE}.lora_B.weight": torch.ones(24, rank)},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 4} | settings))
    return folder


def test_an_adapter_is_scaled_by_alpha_over_rank(tmp_path):
    found = Peft(write(tmp_path, alpha_pattern={"c_attn": 6}), CONFIG).read("blocks.0.attn.qkv.weight")
    assert found is not None and found.unique().tolist() == [6.0]  # 6 / 2, of two products of 1


@pytest.mark.parametrize(("settings", "words"), [
    ({"lora_alpha": 10**400}, "has lora_alpha=<integer of 1329 bits>, which is no number of at most 1e"),
    ({"lora_alpha": float("inf")}, "has lora_alpha=inf, which is no number"),
    ({"lora_alpha": 1e300}, "has lora_alpha=1e.300, which is no number of at most"),
    ({"lora_alpha": True}, "has lora_alpha=true, which is no number"),
    ({"alpha_pattern": {"c_attn": 10**400}}, "c_attn': <integer of 1329 bits>}, which is no number"),
    ({"rank": 0}, "has an adapter of rank 0 for")
])  # fmt: skip
def test_an_alpha_or_a_rank_that_is_none_is_told(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        Peft(write(tmp_path, **settings), CONFIG)
