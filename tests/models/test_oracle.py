"""One process of dtgpt against a run that shares nothing with it (`tests/support/oracle.py`): float64, own Philox."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.compare.rounding import comparable
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from tests.support import oracle
from tests.support.runs import record

STEPS, BATCH, END = 3, 4, 256
LOSS, TENSORS = 2e-6, 1e-5  # relative: fp32 against float64
SIZES = {"num_layers": 2, "seq_length": 13, "vocab_size": 257, "init_std": 0.08}
MODELS = {
    "gpt2": GPT2Config(hidden_size=15, num_heads=3, dropout=0.0, **SIZES),
    "gpt2 dropout": GPT2Config(hidden_size=14, num_heads=2, dropout=0.2, **SIZES),
    "llama": LlamaConfig(
        hidden_size=19, num_heads=3, num_kv_heads=3, head_dim=6, ffn_hidden_size=23, dropout=0.0, **SIZES
    ),
    "llama dropout": LlamaConfig(
        hidden_size=21, num_heads=6, num_kv_heads=2, head_dim=10, ffn_hidden_size=17, dropout=0.15, tied=True,
        qk_norm=True, norm_eps=1e-6, rope_theta=100.0, rope_factor=4.0, rope_original_length=8, **SIZES,
    ),
}  # fmt: skip
DOCUMENTS = [f"{'so ' * (i % 5)}{i} makes {i * i}."[: 5 + i * 7 % 19] for i in range(120)]


def shape_of(model: GPT2Config | LlamaConfig) -> oracle.Shape:
    shape = oracle.Shape(
        layers=model.num_layers, hidden=model.hidden_size, heads=model.num_heads, head_dim=model.head_dim,
        length=model.seq_length, vocab=model.vocab_size, dropout=model.dropout, init_std=model.init_std, eps=1e-5,
    )  # fmt: skip
    if isinstance(model, GPT2Config):
        return shape
    return replace(
        shape, groups=model.num_kv_heads, ffn=model.ffn_hidden_size, tied=model.tied, qk_norm=model.qk_norm,
        eps=model.norm_eps, theta=model.rope_theta, factor=model.rope_factor,
        original_length=model.rope_original_length,
    )  # fmt: skip


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def recipe_of(model: GPT2Config | LlamaConfig, path: Path, masks: bool) -> Recipe:
    options = {"reset_position_ids": masks, "reset_attention_mask": masks, "eod_mask_loss": masks}
    return Recipe(
        name="oracle",
        model=model,
        optimizer=OptimizerConfig(lr=3e-3, schedule="constant", warmup=0, eps=1e-4, clip=0.5, weight_decay=0.3),
        steps=STEPS,
        micro_batch_size=2,
        global_batch_size=BATCH,
        seed=(5 << 32) + 77,
        plan="single",
        device="cpu",
        data=DataConfig(path=str(path), tokenizer="bytes", held_out=0.0, **options),
    )


def check(recipe: Recipe, batches: list[int], rates: list[float], masks: bool) -> None:
    """Hold a run to the oracle's, whose steps have these batches and learning rates."""
    ours = record(recipe, len(batches))
    text = [token for document in DOCUMENTS for token in (*document.encode(), END)]
    training = oracle.Training(recipe.seed, batches, rates, 0.9, 0.95, 1e-4, 0.3, 0.5)
    theirs = oracle.train(shape_of(recipe.model), training, text, END, (masks,) * 3)
    assert ours.losses == pytest.approx(theirs.losses, rel=LOSS)
    assert ours.norms == pytest.approx(theirs.norms, rel=TENSORS)
    assert ours.rates == pytest.approx(rates, rel=1e-6)
    kinds = {name.partition("/")[2] for name in ours.tensors}
    assert kinds == theirs.gradients.keys() == theirs.weights.keys()
    for kind, expected in (("first gradient", theirs.gradients), ("weight", theirs.weights)):
        found = {
            name: relative(ours.tensors[f"{kind}/{name}"], comparable(recipe.model, name, value))
            for name, value in expected.items()
        }
        worst = max(found, key=found.__getitem__)
        assert found[worst] < TENSORS, (kind, worst, found[worst])


@pytest.mark.slow(3)
@pytest.mark.parametrize("masks", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("name", MODELS)
def test_one_process_follows_the_oracle(name, masks, documents):
    check(recipe_of(MODELS[name], documents, masks), [BATCH] * STEPS, [3e-3] * STEPS, masks)


def test_one_process_follows_the_oracle_up_a_ramp_with_rates_by_samples(documents):
    """2, 4 and 6 samples a step, in micro-batches of 2; the learning rate rises for 4 samples and falls until 20."""
    recipe = recipe_of(MODELS["gpt2 dropout"], documents, masks=True)
    optimizer = replace(recipe.optimizer, schedule="linear", warmup_samples=4, decay_samples=20)
    ramp = replace(recipe, optimizer=optimizer, global_batch_size=6, rampup_batch_size="2 2 6", steps=5)
    batches = [2, 2, 4, 6, 6]
    rates = [3e-3 * fraction for fraction in (0.5, 1.0, 1.0, 12 / 16, 6 / 16)]
    check(ramp, batches, rates, masks=True)
