"""Files of peft with numbers that no adapter has."""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import dtgpt
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
    ({"rank": 0}, "has an adapter of rank 0 for"),
    ({"trainable_token_indices": [1, -2]}, "trainable_token_indices=.1, -2., which is no list of tokens"),
    ({"trainable_token_indices": {"wte": 3}}, "trainable_token_indices=.*which is no list of tokens"),
])  # fmt: skip
def test_an_alpha_or_a_rank_that_is_none_is_told(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        Peft(write(tmp_path, **settings), CONFIG)


ROWS = "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta"


def with_rows(folder, rows, **settings):
    save_file({ROWS: rows}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 4} | settings))
    return folder


@pytest.mark.parametrize("indices", [[5, 2], {"wte": [5, 2]}, {"transformer.wte": [5, 2]}])
def test_rows_of_tokens_stand_in_the_place_of_the_models(tmp_path, indices):
    rows = torch.arange(16.0).view(2, 8)
    adapter = Peft(with_rows(tmp_path, rows, trainable_token_indices=indices), CONFIG)
    table = torch.full((128, 8), -1.0)
    found = adapter.replaced("embedding.wte.weight", table)
    assert torch.equal(found[[5, 2]], rows) and (found[[0, 1, 3, 4, 6]] == -1).all() and (table == -1).all()
    part = adapter.replaced("embedding.wte.weight", table[3:7, 2:5], [range(3, 7), range(2, 5)])
    assert torch.equal(part, found[3:7, 2:5])
    assert adapter.replaced("embedding.wpe.weight", table) is table and adapter.read("embedding.wte.weight") is None


@pytest.mark.parametrize(("rows", "indices", "words"), [
    (2, [1, 16], "has a row for token 16, and the model 16 tokens; give the base with its rows"),
    (2, [1], r"of shape \[2, 8\] for 1 tokens"), (2, [1, 1], "for 1 tokens"), (2, {"lm_head": [1, 2]}, "for 0 tokens"),
    (2, None, "for 0 tokens"),
])  # fmt: skip
def test_rows_of_other_tokens_are_told(tmp_path, rows, indices, words):
    with pytest.raises(UserError, match=words):
        Peft(with_rows(tmp_path, torch.ones(rows, 8), trainable_token_indices=indices), CONFIG)


@pytest.mark.slow(5)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("by_module", [True, False])
def test_a_folder_of_peft_with_rows_gives_its_logits(tmp_path, tied, by_module):
    """Rows that peft itself saved, beside LoRA; of an output layer of its own, too, where it is named."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    model.save_pretrained(tmp_path / "base")
    modules = {"embed_tokens": [7, 3]} | ({} if tied else {"lm_head": [9]})
    settings = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": modules if by_module else [7, 3]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
            assert "lora_" in name or "token_adapter" in name
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([[7, 1, 3, 9, 20, 7]])
    with torch.no_grad():
        expected = adapted(tokens).logits
    found = dtgpt.load(tmp_path / "base", adapter=tmp_path / "adapter", device="cpu")(tokens)
    torch.testing.assert_close(found[..., :64], expected, rtol=1e-4, atol=1e-5)
    plain = dtgpt.load(tmp_path / "base", device="cpu")(tokens)
    assert (plain - found).abs().max() > 0.01
