"""Tokens that a run adds to the tokenizer and the weights of a model."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import dtgpt
from dtgpt.checkpoint.open import open_source
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.prepare import PrepareConfig, prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.ops.random.philox import root_key
from dtgpt.posttrain.add_tokens.config import AddTokensConfig
from dtgpt.posttrain.add_tokens.source import Drawn
from dtgpt.posttrain.add_tokens.tokens import NewToken, added_to, read_tokens, with_tokens
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.loop import train
from dtgpt.train.start import load_recipe, override, settle
from dtgpt.util.errors import UserError
from tests.support.bodies_lora import train_and_save
from tests.support.ranks import pool
from tests.support.vocabularies import gpt2_files, sentencepiece_model, tokenizer_json

pytestmark = pytest.mark.slow(10)

STEPS = 3
NEW = ["quick brown", "<tool>", "Grüße", *(f"<word {i}>" for i in range(120))]  # more than the padding to 384 rows
SIZES = {
    "vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0,
    "eos_token_id": 1, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def save_base(folder: Path, tied: bool) -> Path:
    """A model as transformers saves it, with its tokenizer."""
    folder.mkdir()
    tokenizer_json(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture
def grown(recipe, tied, tmp_path):
    """A run that goes on with a model and new tokens."""
    base = save_base(tmp_path / "base", tied)
    (tmp_path / "tokens.txt").write_text("\n".join(NEW) + "\n")
    (tmp_path / "text.txt").write_text("".join(f"the quick brown fox <tool> {i} <word {i}> Grüße\n" for i in range(99)))
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1)
    asked = replace(
        recipe, model=replace(open_config(base), seq_length=16), init_from=str(base), optimizer=optimizer, steps=STEPS,
        add_tokens=AddTokensConfig(file=str(tmp_path / "tokens.txt")), data=DataConfig(path=str(tmp_path / "text.txt")),
    )  # fmt: skip
    return settle(asked, {})


@pytest.mark.parametrize("lora", [0, 4])
def test_every_plan_has_the_same_rows_and_goes_on_where_another_stopped(grown, lora, tied, tmp_path):
    grown = replace(grown, lora=LoraConfig(rank=lora))
    assert grown.model.vocab_size == 280 + len(NEW)
    first, begun = train_and_save(grown, tmp_path / "begun", 0)
    losses, weights = train_and_save(grown, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.1
    for plan in ("dp2_zero3", "tp2_sp", *(["pp2"] if not (lora and tied) else [])):
        world = parse_plan(plan).world
        found = pool().run(world, train_and_save, replace(grown, plan=plan), tmp_path / f"{plan} begun", 0)[0][1]
        assert begun.keys() == found.keys()
        assert all(torch.equal(begun[name], found[name]) for name in begun), plan
        run = tmp_path / plan
        steps = pool().run(world, train_and_save, replace(grown, plan=plan), run, 2)[0][0]
        steps += train_and_save(replace(grown, micro_batch_size=2), run, STEPS)[0]  # as one process
        assert steps == pytest.approx(losses, abs=2e-6), plan
    if lora:
        rows = {name: tensor for name, tensor in weights.items() if name.endswith("new_rows.weight")}
        assert {tuple(tensor.shape) for tensor in rows.values()} == {(len(NEW), 32)} and len(rows) == 2 - tied
        assert all((begun[name] != weights[name]).any() for name in rows)
